"""Where each parameter lies in the flat buffer of its unit (pure).

A unit is what is reduced and stepped together: the parameters of one layer, in one buffer, each beginning at a multiple of 64 elements.
"""

from dataclasses import dataclass

from hpczero.model.shapes import Layer, Parameter

ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    parameter: Parameter
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.parameter.size


@dataclass(frozen=True)
class UnitLayout:
    name: str
    places: tuple[Place, ...]
    size: int


def unit_layout(layer: Layer) -> UnitLayout:
    places, offset = [], 0
    for parameter in layer.parameters:
        places.append(Place(parameter, offset))
        offset += -(-parameter.size // ALIGNMENT) * ALIGNMENT
    return UnitLayout(layer.name, tuple(places), offset)
