"""hpczero's own families of models, by the spec's word for them (pure).

To add one: its torch model beside `gpt.py`, its record beside `gpt_record.py`, its name here, and
what CONTRIBUTING.md lists.
"""

from hpczero.model.bert_record import BERT
from hpczero.model.gpt_record import GPT
from hpczero.model.llama_record import LLAMA
from hpczero.model.shapes import Family, Layer
from hpczero.model.t5_record import T5
from hpczero.spec.schema import Model

# device -> operations whose kernels change the memory that activations take there
# (`ChunkLayout.kernels`)
KERNELS_THAT_CHANGE_MEMORY = {
    "cpu": frozenset({"glu", "relative_attention", "rms_norm"}),
    "cuda": frozenset({"cross_entropy", "glu", "relative_attention", "rms_norm"}),
}

FAMILIES: dict[str, Family] = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "t5": T5}


def family(model: Model) -> Family:
    return FAMILIES[model.family]


def layers(model: Model) -> list[Layer]:
    return family(model).layers(model)


def known(model: Model) -> bool:
    """Return True for hpczero's own families.

    The layers of "package.module:factory" are not known without building the model.
    """
    return model.family in FAMILIES


def layer_count(model: Model) -> int:
    """Return len(layers(model)) without listing the blocks."""
    return model.layers + len(layers(model.model_copy(update={"layers": 0, "encoder_layers": 0})))


def parameter_count(model: Model) -> int:
    return sum(layer.size for layer in layers(model))
