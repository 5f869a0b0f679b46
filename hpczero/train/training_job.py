"""The job that `hpczero run` carries out."""

from dataclasses import dataclass

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.token_source import TokenSource
from hpczero.model.shapes import Layer
from hpczero.parallel.parallelize import UserModel
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class TrainingJob:
    """The facts that all ranks have agreed on before anything is written."""

    spec: Spec
    asked: Spec  # in which some keys leave to the run what `spec` has
    world: World
    grid: Grid
    source: TokenSource
    threads: int
    layers: list[Layer] | None  # of the whole model; None: not known
    user_model: UserModel | None  # made by model.family = "package.module:factory"
