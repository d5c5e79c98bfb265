"""The checksum model's tokens in plain Python integers, written apart from the worker's."""

MASK = 2**64 - 1
VOCAB_SIZE = 1000


def _weight(position: int) -> int:
    z = (position + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31 | 1


def continuation(prompt: list[int], count: int, end_ids: tuple[int, ...] = ()) -> list[int]:
    """The `count` tokens after the prompt, or fewer when one of end_ids comes (it is included)."""
    total = sum((token + 1) * _weight(i) for i, token in enumerate(prompt))
    output: list[int] = []
    while len(output) < count:
        token = ((total & MASK) >> 32 & 0x7FFFFFFF) % VOCAB_SIZE
        total += (token + 1) * _weight(len(prompt) + len(output))
        output.append(token)
        if token in end_ids:
            break
    return output


def check_outputs(outputs: dict[int, list[int]], requests: dict[int, tuple[list[int], int]], aborted: set[int]) -> None:
    """Assert that every request, a prompt and a count, got its own tokens: an aborted one the first of them, any other all."""
    for handle, (prompt, count) in requests.items():
        expected = continuation(prompt, count)
        assert outputs[handle] == (expected[: len(outputs[handle])] if handle in aborted else expected)
