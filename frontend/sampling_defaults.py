"""What a model's generation_config.json says of sampling.

The rule: with --generation-config auto (the default), a request that leaves temperature, top_k, top_p, min_p or repetition_penalty open, or
null, gets the file's value; where the file has none, or with --generation-config none, the engine's own: temperature 1, the others off. A
value in a request always wins, 0 and 1 too. `do_sample` is not read: whoever wants greedy decoding asks for temperature 0.
"""

import logging
from pathlib import Path

import msgspec

from frontend.tokenizer import read_json
from protocol.config import EngineConfig
from protocol.sampling import BOUNDS, SamplingParams

log = logging.getLogger(__name__)

FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values for what a request leaves open; None: the engine's own."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float]:
        """Those that there are."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def fill(self, params: SamplingParams) -> SamplingParams:
        """The parameters with these in the place of None."""
        open_ones = {name: value for name, value in self.given().items() if getattr(params, name) is None}
        return msgspec.structs.replace(params, **open_ones) if open_ones else params


def load_defaults(config: EngineConfig) -> SamplingDefaults:
    """Those of the model's folder. Raises ValueError naming file, field and value for one out of bounds."""
    file = Path(config.model) / FILE
    if config.generation_config == "none" or not file.is_file():
        return SamplingDefaults()
    defaults = read_json(file, SamplingDefaults)
    for name, value in defaults.given().items():
        low, high = BOUNDS[name]
        if not low <= value <= high:
            raise ValueError(f"{file}: {name} must be between {low} and {high}, got {value}; --generation-config none ignores the file")
    if defaults.given():
        text = ", ".join(f"{name} {value:g}" for name, value in defaults.given().items())
        log.info("requests that leave them open get %s, from %s", text, file.name)
    return defaults
