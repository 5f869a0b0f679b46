"""The pieces of a step, predicted for a cluster (pure)."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from hpczero.planner.cluster import Cluster
from hpczero.planner.links import Links
from hpczero.planner.memory import saves_behind
from hpczero.planner.once import Once
from hpczero.planner.rates import PassTime, Rates
from hpczero.planner.sent import Sent
from hpczero.planner.software import Software
from hpczero.planner.spread import Spread
from hpczero.planner.step_costs import Edge, Seconds
from hpczero.planner.step_work import Repeated, StepWork
from hpczero.planner.work import Alike
from hpczero.spec.rules import AXES

_GIGA, _MILLI, _MICRO = 1e9, 1e-3, 1e-6
_USUALLY_HIDDEN = 0.7  # a guess
_GATHERS_ONCE_MORE = 1.5  # a backward's sum by a forward's, with sequence parallelism


class _Exchange(NamedTuple):
    """Seconds of a stage's data ranks in a step."""

    reduced: float  # among those that have one copy of the states
    gathered: float
    joined: float  # over replicas


class Predicted:
    """The costs of a step's work on a cluster.

    `once`: what layouts of one job on this cluster share, if there are several.
    """

    def __init__(
        self, work: StepWork, cluster: Cluster, software: Software, once: Once | None = None
    ) -> None:
        self.work, self.cluster, self.software = work, cluster, software
        self._once = once or Once()
        precision, ranks = work.spec.train.precision, work.nodes.most
        self.rates = self._once(Rates.of, "", cluster, precision, ranks, software)
        self.links = self._once(Links.of, "", cluster, work.nodes)
        self._messages: dict[bool, float] = {}
        self._of_tensor: dict[int, tuple[float, float]] = {}
        self._of_data: dict[int, _Exchange] = {}

    def hidden(self) -> float:
        """Return what the software is known for, what was measured where data's ranks lie, or what
        is usual.
        """
        on_nodes = self.work.spreads["data"].nodes
        measured = (self.cluster.network if on_nodes > 1 else self.cluster.node).hidden
        known = (self.software.hidden, measured, _USUALLY_HIDDEN)
        return next(share for share in known if share is not None)

    def like(self, stage: int) -> int:
        return self._like[stage]

    @cached_property
    def _like(self) -> list[int]:
        """The first stage of those that are alike, and of whose neighbours as many are near."""
        like, tables = self.work.like, (self.cluster.network, self.cluster.node)
        if self.rates.is_gpu or all(table.hidden is None for table in tables):
            return like
        first: dict[object, int] = {}
        near = [
            (self._is_between(stage - 1), self._is_between(stage)) for stage in self.work.stages
        ]
        return [
            first.setdefault(key, stage) for stage, key in enumerate(zip(like, near, strict=True))
        ]

    # ------------------------------------------------------------------------ a micro-batch

    def action(self, kind: str, stage: int, chunk: int) -> Seconds:
        part, backward = self.work.parts[stage][chunk], kind == "backward"
        compute = attention = memory = host = 0.0
        for alike, count in part.layers:
            time = self._time(alike)[backward]
            compute += count * time.compute
            attention += count * time.attention
            memory += count * time.memory
            host += count * time.host
        if backward and self.software.accumulates_apart:
            memory += self.rates.moved(self.work.accumulated(stage, chunk))
        device = compute + attention + memory
        return {
            "compute": compute,
            "attention": attention,
            "memory": memory,
            "launch": max(0.0, host - device) if self.rates.is_gpu else host,
            "tensor": self._tensor_sum(stage)[backward] * self.work.sums(part)[backward],
            "messages": self._work_on_messages(stage, chunk),
        }

    def _time(self, alike: Alike) -> tuple[PassTime, PassTime]:
        return self._once(self._time_of_passes, (alike.kind, self.work.layout), alike)

    def _time_of_passes(self, alike: Alike) -> tuple[PassTime, PassTime]:
        forward, backward = self.work.passes(alike)
        return self.rates.time(forward), self.rates.time(backward)

    def _tensor_sum(self, stage: int) -> tuple[float, float]:
        """Return the seconds of tensor's collectives for each sum, in forward and in backward.

        The few that are no sums of activations are spread over these.
        """
        spread = self.work.spreads["tensor"]
        if spread.ranks == 1:
            return 0.0, 0.0
        if stage not in self._of_tensor:
            sums = [self.work.sums(part) for part in self.work.parts[stage]]
            forward, backward = (sum(column) for column in zip(*sums, strict=True))
            more = _GATHERS_ONCE_MORE if self.work.layout.sequence else 1.0
            each = 0.0
            if forward + backward:
                messages = self.work.tensor_messages(stage)
                seconds = self._together(messages, spread) / self.work.batch.micro_batches
                each = seconds / (forward + more * backward)
            self._of_tensor[stage] = each, more * each
        return self._of_tensor[stage]

    def _together(self, messages: Iterable[Repeated], spread: Spread) -> float:
        """Return the seconds of operations, of which each sends what it says."""
        return sum(
            each.count * self._collective(each.operation, each.sent, spread) for each in messages
        )

    def _collective(self, operation: str, sent: Sent, spread: Spread, count: float = 1) -> float:
        rings = operation in self.software.rings
        return self.links.collective(operation, sent, spread, rings, count)

    def bus(self, kind: str, stage: int, chunk: int) -> float:
        return self.work.over_bus(stage, chunk) / self._bus_rate

    @property
    def _bus_rate(self) -> float:
        device = self.cluster.device
        return (device.bus_gb_s or device.bandwidth_gb_s) * _GIGA

    def transfer(self, part: int) -> float:
        between = self._is_between(part)
        if between not in self._messages:
            self._messages[between] = self._message(between)
        return self._messages[between]

    def _is_between(self, part: int) -> bool:
        """Return True if a part and the next one are on different nodes."""
        node = self.work.node_of_stage
        return node[part % len(node)] != node[(part + 1) % len(node)]

    def _work_on_messages(self, stage: int, chunk: int) -> float:
        """Return the seconds of an action in which its rank works on messages, where measured.

        What computing does not hide of an exchange is work on both directions; of each message a
        rank has one. On GPUs it is the host's, and the device goes on.
        """
        if self.rates.is_gpu:
            return 0.0
        stages = len(self.work.parts)
        part = chunk * stages + stage
        last = stages * len(self.work.parts[0]) - 1
        seconds = 0.0
        for link in (part - 1, part):
            if stages > 1 and 0 <= link < last:
                table = self.cluster.network if self._is_between(link) else self.cluster.node
                if table.hidden is not None:
                    seconds += (1 - table.hidden) / 2 * self.transfer(link)
        return seconds

    def _message(self, between: bool) -> float:
        work = self.work
        spread, tensor = work.spreads["pipeline"], work.spreads["tensor"]
        if not self.software.divides_messages or work.layout.sequence or tensor.ranks == 1:
            return self.links.message(work.message, spread, between)
        piece = work.message / tensor.ranks
        gathered = Sent(int(work.message - piece))
        return self.links.message(piece, spread, between) + self.links.collective(
            "all_gather", gathered, tensor, rings=True
        )

    # ------------------------------------------------------------------------ the data axis

    def _exchanged(self, stage: int) -> _Exchange:
        if stage not in self._of_data:
            traffic = self.work.traffic(stage)
            reduced, gathered = (
                self._collective(each.operation, each.sent, self.work.spreads["shard"], each.count)
                for each in (traffic.reduced, traffic.gathered)
            )
            joined = sum(
                self._collective(
                    each.operation, each.sent, self.work.spreads["replica"], each.count
                )
                for each in traffic.joined
            )
            reduced += self._read_in_windows(traffic.read)
            self._of_data[stage] = _Exchange(reduced, gathered, joined)
        return self._of_data[stage]

    def _read_in_windows(self, size: float) -> float:
        measured = self.cluster.node.window_gb_s
        return size / (measured * _GIGA) if measured else self.rates.moved(size)

    def data(self, kind: str, stage: int, chunk: int) -> float:
        """Return those of stages 2 and 3, spread over the chunks by their parameters.

        What is waited for, at the ends of a step, is apart (`weights`, `gradients`).
        """
        work = self.work
        reduced, gathered, _ = self._exchanged(stage)
        seconds = 0.0
        if work.sharded.parameters:
            seconds = gathered / 2
            if kind == "forward":
                seconds -= self._first_gathered(stage)
        if kind == "backward" and work.sharded.gradients:
            seconds += reduced - self._first_reduced(stage)
        if seconds <= 0:
            return 0.0
        held = work.held[stage]
        return seconds * held.by_chunk[chunk] / held.all / work.batch.micro_batches

    def _first(self, each: Repeated, stage: int, passes: int, axis: str = "shard") -> float:
        """Return the seconds of the first layer's unit, in one of so many passes over all units."""
        held = self.work.held[stage]
        share = held.first / held.all / passes
        sent = Sent(int(each.sent.inside * share), int(each.sent.between * share))
        return self._collective(each.operation, sent, self.work.spreads[axis])

    def _first_gathered(self, stage: int) -> float:
        work = self.work
        passes = 2 * work.batch.micro_batches if work.sharded.parameters else 1
        return self._first(work.traffic(stage).gathered, stage, passes)

    def _first_reduced(self, stage: int) -> float:
        work = self.work
        passes = work.batch.micro_batches if work.sharded.gradients else 1
        return self._first(work.traffic(stage).reduced, stage, passes)

    def weights(self, stage: int) -> Edge:
        """Return the gathers of new weights, and the update of states that are elsewhere.

        The first unit is waited for: at stage 3 that of the first forward.
        """
        work = self.work
        gathered = self._exchanged(stage).gathered
        hides = self.software.hides_weights
        offload = self._offload(stage) if work.is_elsewhere and hides else 0.0
        if work.sharded.parameters:
            return Edge(self._first_gathered(stage), 0.0, offload)
        if not work.sharded.optimizer:
            return Edge(offload=offload)
        if not hides:
            return Edge(gathered)
        first = min(gathered, self._first_gathered(stage))
        return Edge(first, gathered - first, offload)

    def gradients(self, stage: int) -> Edge:
        """Return the sums of the last backward: that of the first layer's unit is waited for.

        Sums over replicas begin as those of a replica end; 1-bit Adam's steps after all of them.
        """
        work = self.work
        reduced, gathered, joined = self._exchanged(stage)
        first = self._first_reduced(stage)
        total = first if work.sharded.gradients else reduced
        if not work.sharded.optimizer:
            total, first = total + gathered, first + self._first_gathered(stage)
        after = joined if work.exchanged.of == "steps" else 0.0
        if work.exchanged.of == "gradients":
            total += joined
            exchanges = work.traffic(stage).joined
            first += sum(self._first(each, stage, 1, "replica") for each in exchanges)
        if not self.software.hides_reduction:
            return Edge(total + after)
        first = min(total, first)
        return Edge(first + after, total - first)

    # ---------------------------------------------------------------------- after all backwards

    def _offload(self, stage: int) -> float:
        """Return the seconds of an update by the CPU, over the bus, or through files."""
        work, node = self.work, self.cluster.node
        ranks = work.nodes.most
        seconds = work.updated(stage) / (node.bandwidth_gb_s / ranks * _GIGA)
        if work.platform.on_gpus:
            seconds = max(seconds, work.held[stage].over_bus / self._bus_rate)
        if work.spec.zero.folder and node.nvme_gb_s:  # or else `need_files` refuses
            moved = 2 * work.owned(stage) * work.platform.update_of(work.spec).of_element
            seconds = max(seconds, moved / (node.nvme_gb_s / ranks * _GIGA))
        return seconds

    def after(self) -> Seconds:
        work = self.work
        update = max(map(work.updated, set(work.like)))
        matrices = max(map(self._orthogonalised, set(work.like)))
        offload = 0.0
        if work.is_elsewhere and not self.software.hides_weights:
            offload = max(map(self._offload, set(work.like)))
        small = sum(
            self._collective("all_reduce", Sent(), work.spreads[axis]) for axis in (*AXES, "world")
        )
        tied = (
            self._collective("all_reduce", sent, work.spreads["pipeline"])
            for sent in work.ties
            if sent != Sent()
        )
        return {
            "optimizer": 0.0 if work.is_elsewhere else update / self.rates.of_update + matrices,
            "messages": max(tied, default=0.0),
            "offload": offload,
            "overhead": self.cluster.device.step_us * _MICRO
            + self.software.step_ms * _MILLI
            + small,
        }

    def _orthogonalised(self, stage: int) -> float:
        """Return the seconds of Muon's products on the stage's busiest rank."""
        ranks = self.work.nodes.ranks // len(self.work.held)
        seconds = [
            sum(map(self.rates.product, products)) for products in self.work.orthogonalised(stage)
        ]
        return max(sum(seconds) / ranks, max(seconds, default=0.0))

    def beside_next(self, step: float) -> float:
        """Return what is longer than a step of the turns of local steps' fragments."""
        exchanged = self.work.exchanged
        if exchanged.of != "weights":
            return 0.0
        joined = max(self._exchanged(stage).joined for stage in set(self.work.like))
        turns = exchanged.fragments / exchanged.every
        turn = joined / turns
        return turns * (turn - self.hidden() * min(turn, step))

    def checkpoint(self, step: float) -> float:
        work, files = self.work, self.cluster.files
        every = work.spec.checkpoint.every
        if not 0 < every < work.spec.train.steps or files is None:
            return 0.0
        owned = max(held.shards for held in work.held)
        replicas = work.spreads["replica"].ranks
        saved, _ = work.exchanged.saved(work.platform.update_of(work.spec).of_element, replicas)
        states = owned * saved / replicas
        write = states * work.nodes.most / (files.node_gb_s * _GIGA)
        if files.all_gb_s:
            write = max(write, states * work.nodes.ranks / (files.all_gb_s * _GIGA))
        if not saves_behind(work.spec):
            return write / every
        return states / self._bus_rate / every + max(0.0, write / every - step)


class Computing(Predicted):
    """The costs of a step's actions alone."""

    def data(self, kind: str, stage: int, chunk: int) -> float:
        return 0.0

    def transfer(self, part: int) -> float:
        return 0.0

    def weights(self, stage: int) -> Edge:
        return Edge()

    def gradients(self, stage: int) -> Edge:
        return Edge()

    def after(self) -> Seconds:
        return {}

    def beside_next(self, step: float) -> float:
        return 0.0

    def checkpoint(self, step: float) -> float:
        return 0.0
