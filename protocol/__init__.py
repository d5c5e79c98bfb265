"""What the processes say to each other, and how. Imports nothing else of ours."""
