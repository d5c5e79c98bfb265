"""Between clients and the scheduler: tokenizer, text, doors. Imports only `protocol`; never torch."""
