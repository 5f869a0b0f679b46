"""Tables and keys of the spec: how one is described, and the types of their values."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpczero.text import toml_repr

Role = Literal["identity", "changeable", "site"]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
PATH = r"^[^\x00-\x1f\x7f-\x9f]*$"
FACTORY = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
WORD = r"^([A-Za-z0-9_][A-Za-z0-9_.,:@+=/&|()\[\]*-]{0,254})?$"
SITE = r"^(auto|[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,63})?)$"
WALLTIME = (
    r"^([0-9]{1,4}-[0-9]{1,2}:[0-9]{2}:[0-9]{2}|[0-9]{1,5}:[0-9]{2}:[0-9]{2}"
    r"|([0-9]{1,4}d)?([0-9]{1,5}h)?([0-9]{1,6}m)?([0-9]{1,8}s)?)$"
)
MEMORY = r"^([1-9][0-9]{0,8}[MGT])?$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
DIRECTIVE = r"^-{1,2}[A-Za-z][^\x00-\x1f\x7f-\x9f]{0,999}$"
OFFLOAD = r"^(none|cpu|nvme:[^\x00-\x1f\x7f-\x9f]{1,4000})$"
CONTAINER = r"^((apptainer|shifter):[^\x00-\x1f\x7f-\x9f]{1,4000})?$"
# Bound of the counts that have no natural one: their sums and products stay exact everywhere.
LARGEST = 10**15
# pattern of a text -> its meaning in words
PATTERNS = {
    NAME: 'at most 100 letters, digits, ".", "_", "-", the first a letter or digit',
    PATH: "no control characters",
    FACTORY: 'as in "package.module:factory"',
    WORD: "one word: letters, digits, and _.,:@+=/&|()[]*-, the first a letter, digit or _",
    SITE: 'as in "perlmutter" or "perlmutter/gpu", or "auto"',
    WALLTIME: 'a duration as in "90m", "1h30m", "2d", "12:00:00" or "1-12:00:00"',
    MEMORY: 'as in "500G"',
    VARIABLE: "name of an environment variable",
    DIRECTIVE: 'as in "--network=disable_rdzv_get", one line',
    OFFLOAD: '"none", "cpu" or a folder as in "nvme:/local/scratch"',
    CONTAINER: 'as in "apptainer:/path/image.sif" or "shifter:docker:group/image:tag"',
}


def key(default: Any, role: Role, description: str, **limits: Any) -> Any:
    """Describe a key of the spec; the limits are those of pydantic (gt, ge, le, ...)."""
    return Field(
        default=default, description=description, json_schema_extra={"role": role}, **limits
    )


Factory = Annotated[str, Field(pattern=FACTORY, max_length=200)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positions = Annotated[int, Field(ge=0, le=LARGEST)]
Ranks = Annotated[int, Field(ge=1, le=1_000_000)]
Word = Annotated[str, Field(pattern=WORD, min_length=1)]
Text = Annotated[str, Field(pattern=PATH, max_length=4096)]
Line = Annotated[str, Field(pattern=PATH, min_length=1, max_length=4096)]
Variable = Annotated[str, Field(pattern=VARIABLE)]
Site = Annotated[str, Field(pattern=SITE)]
Directive = Annotated[str, Field(pattern=DIRECTIVE)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    def __repr__(self) -> str:
        """Return it as TOML's table in a line, without the values that are the default."""
        default = type(self).model_construct()
        said = [
            f"{name} = {toml_repr(value)}"
            for name, value in self
            if name in self.model_fields_set or value != getattr(default, name)
        ]
        return "{" + ", ".join(said) + "}"
