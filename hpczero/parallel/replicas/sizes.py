"""The sizes of what replicas send each other (pure).

An exchange makes an average of one tensor of each of R replicas, in two passes. The tensor is cut
into R parts. Every replica sends part r to replica r (all_to_all), which averages what arrives and
sends the average to all (all_gather). Each pass sends numbers of one form.
"""

from dataclasses import dataclass

from hpczero.parallel.layout import ALIGNMENT


@dataclass(frozen=True)
class Form:
    """The form of numbers in a message: `bits` of each, and an fp32 scale of each `block`, if any.

    A message has the scales first.
    """

    name: str
    bits: int
    block: int = 0

    def scales(self, elements: int) -> int:
        """Return the number of scales."""
        return -(-elements // self.block) if self.block else 0

    def message(self, elements: int) -> int:
        """Return the bytes of a message of so many elements."""
        return 4 * self.scales(elements) + -(-elements * self.bits // 8)

    def part(self, elements: int, replicas: int) -> int:
        """Return the elements of a replica's part; those of the last replicas may be fewer."""
        whole = self.block or ALIGNMENT
        return -(-elements // (replicas * whole)) * whole


FORMS = {
    form.name: form
    for form in (
        Form("fp32", 32),
        Form("bf16", 16),
        Form("fp16", 16),
        Form("int8", 8, 256),
        Form("int4", 4, 256),
        Form("1bit", 1, 2048),
    )
}


def part_of(form: Form, elements: int, replicas: int, replica: int) -> slice:
    """Return the elements that a replica averages."""
    length = form.part(elements, replicas)
    return slice(min(replica * length, elements), min((replica + 1) * length, elements))
