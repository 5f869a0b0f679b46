"""Workers that send less than whole gradients, simulated in one process, in plain PyTorch.

The model is a serial one. What is sent is cut as ranks cut it: a unit's elements among the tensor
ranks, then into shards, of which each is sent by itself, in blocks that share a scale.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpczero.model import build, families
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.pipeline.partition import chunks_of_stages
from hpczero.parallel.replicas.turns import fragment_of_update, fragments_of
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from tests.support.training import LearnableSource

BLOCKS = {"1bit": 2048, "int8": 256, "int4": 256}

Values = dict[str, Tensor]  # of parameters, by name
Vectors = list[Tensor]  # of each worker


def compressed(form: str, total: Tensor, living: Tensor) -> Tensor:
    """Return what a message says of the values."""
    if form in ("fp32", "bf16"):
        return total.to({"fp32": torch.float32, "bf16": torch.bfloat16}[form]).float()
    sent = torch.zeros_like(total)
    for start in range(0, total.numel(), BLOCKS[form]):
        block = slice(start, start + BLOCKS[form])
        values = torch.where(living[block], total[block], 0.0)
        if form == "1bit":
            scale = values.abs().sum() / living[block].sum().clamp(min=1)
            sent[block] = torch.where(living[block], torch.copysign(scale, values), 0.0)
        else:
            scale = values.abs().max() / {"int8": 127, "int4": 7}[form]
            sent[block] = (values / scale).round() * scale if scale > 0 else 0.0
    return sent


class Exchange:
    """The average over the workers of one tensor each, with error feedback if it is wanted."""

    def __init__(self, form: str, feedback: bool, workers: int, elements: int) -> None:
        self.form = form
        self.feedback = feedback and form in BLOCKS
        self.errors = torch.zeros(workers, elements)
        self.served = torch.zeros(elements)

    def __call__(self, vectors: Vectors, exact: Tensor, living: Tensor) -> Tensor:
        """`exact`: the elements that are sent as they are; others than `living` take no part."""
        plain = torch.stack(vectors).sum(0) / len(vectors)
        if self.form not in BLOCKS:
            sent = [compressed(self.form, vector, living) for vector in vectors]
            return compressed(self.form, torch.stack(sent).sum(0) / len(sent), living)
        living = living & ~exact
        said = []
        for vector, error in zip(vectors, self.errors, strict=True):
            total = torch.where(living, vector + error, 0.0)
            said.append(compressed(self.form, total, living))
            error.copy_((total - said[-1]) * self.feedback)
        total = torch.where(living, torch.stack(said).sum(0) / len(said) + self.served, 0.0)
        average = compressed(self.form, total, living)
        self.served.copy_((total - average) * self.feedback)
        return torch.where(exact, plain, average)


@dataclass
class Twin:
    """`workers`, each of `shards` data ranks; `tensor` ranks share each layer."""

    spec: Spec
    workers: int
    shards: int
    tensor: int = 1

    def __post_init__(self) -> None:
        spec = self.spec
        data_ranks = self.workers * self.shards
        self.layers = [layer for layer in families.layers(spec.model) if layer.parameters]
        self.decays = {p.name: p.decays for layer in self.layers for p in layer.parameters}
        self.batches = [
            Batches(spec, LearnableSource(spec), rank, data_ranks) for rank in range(data_ranks)
        ]
        model = _initial(spec)
        apart = spec.optimizer.outer.every > 0
        self.models = [copy.deepcopy(model) for _ in range(self.workers if apart else 1)]
        self.losses: list[float] = []
        self.outer: Values = {}  # of local steps
        self._exchanges: dict[tuple[str, int, int], Exchange] = {}

    def train(self) -> None:
        outer = self.spec.optimizer.outer.every
        run = self._local_steps if outer else self._summed
        if self.spec.optimizer.name == "one_bit_adam":
            run = self._one_bit_adam
        run()

    @property
    def weights(self) -> Values:
        return values_of(self.models[0])

    # -- the methods

    def _summed(self) -> None:
        """Sums in 8 bits, or none; the rest is AdamW."""
        adam = Adam(self.spec, self.decays)
        compress = self.spec.comm.compress
        for step in range(self.spec.train.steps):
            gradients = self._gradients(step)
            mean = self._mean(gradients, compress if compress != "none" else "fp32", False)
            adam.step(self.models[0], mean, step)

    def _one_bit_adam(self) -> None:
        adam = Adam(self.spec, self.decays)
        beta1, beta2 = self.spec.optimizer.betas
        frozen = self.spec.optimizer.freeze
        for step in range(self.spec.train.steps):
            gradients = self._gradients(step)
            if step < frozen:
                adam.step(self.models[0], self._mean(gradients, "fp32", False), step)
                continue
            roots = {
                name: (v / (1 - beta2**frozen)).sqrt() + self.spec.optimizer.eps
                for name, v in adam.second.items()
            }
            living = {name: v != 0 for name, v in adam.second.items()}
            steps = []
            for gradient in gradients:
                clipped(gradient, self.spec.train.grad_clip)
                own = {n: beta1 * adam.first[n] + (1 - beta1) * g for n, g in gradient.items()}
                steps.append({n: torch.where(living[n], m / roots[n], 0.0) for n, m in own.items()})
            u = self._mean(steps, "1bit", True, living)
            adam.first = {name: u[name] * roots[name] for name in u}
            lr = learning_rate(self.spec, step)
            for name, weight in self.weights.items():
                weight.mul_(1 - lr * self._decay(name))
                weight.sub_(u[name] * lr / (1 - beta1 ** (step + 1)))

    def _local_steps(self) -> None:
        spec, options = self.spec, self.spec.optimizer.outer
        adams = [Adam(spec, self.decays) for _ in self.models]
        outer = self.outer = {name: weight.clone() for name, weight in self.weights.items()}
        momentum = {name: torch.zeros_like(weight) for name, weight in outer.items()}
        for step in range(spec.train.steps):
            gradients = self._gradients(step)
            if step < options.begin:
                mean = self._mean(gradients, "fp32", False)
                gradients = [{n: g.clone() for n, g in mean.items()} for _ in gradients]
            turn = fragment_of_update(step, options.every, options.fragments)
            names = self._fragment(turn) if step > options.begin else []
            if step == options.begin:
                outer.update({name: w.clone() for name, w in self.weights.items()})
            if names:
                apart = [
                    {n: outer[n] - w for n, w in values_of(model).items()} for model in self.models
                ]
                d = self._mean(apart, options.precision, True, only=names)
                for name in names:
                    momentum[name].mul_(options.momentum).add_(d[name])
                    nesterov = d[name] + options.momentum * momentum[name]
                    outer[name].sub_(options.lr * nesterov)
                    for model in self.models:
                        values_of(model)[name].copy_(outer[name])
            for model, adam, gradient in zip(self.models, adams, gradients, strict=True):
                adam.step(model, gradient, step)
        mean = {
            name: torch.stack([values_of(model)[name] for model in self.models]).mean(0)
            for name in outer
        }
        for name, weight in self.weights.items():
            weight.copy_(mean[name])

    def _fragment(self, turn: int | None) -> list[str]:
        if turn is None:
            return []
        found = []
        for chunks in chunks_of_stages(self.spec, self.layers):  # each stage cuts its own layers
            layers = [layer for chunk in chunks for layer in chunk]
            sizes = [self._layout(layer, 0).size for layer in layers]
            fragment = fragments_of(sizes, self.spec.optimizer.outer.fragments)[turn]
            found += [p.name for number in fragment for p in layers[number].parameters]
        return found

    def _decay(self, name: str) -> float:
        return self.spec.optimizer.weight_decay if self.decays[name] else 0.0

    # -- gradients, and what is sent

    def _gradients(self, step: int) -> list[Values]:
        """Return each worker's gradient of the mean loss, so that their mean is that of all."""
        tokens = self.spec.train.global_batch * self.spec.seq_len
        found = []
        loss = 0.0
        for worker in range(self.workers):
            model = self.models[min(worker, len(self.models) - 1)]
            model.zero_grad()
            for rank in range(worker * self.shards, (worker + 1) * self.shards):
                for batch in self.batches[rank].training(step):
                    own = model(batch)
                    loss += float(own.detach())
                    (own * (self.workers / tokens)).backward()
            parameters = model.named_parameters()
            found.append({n: p.grad.clone() for n, p in parameters if p.grad is not None})
        self.losses.append(loss / tokens)
        return found

    def _layout(self, layer: object, rank: int) -> UnitLayout:
        return unit_layout(layer, self.shards, self.tensor, rank)  # type: ignore[arg-type]

    def _mean(
        self,
        values: Sequence[Values],
        form: str,
        feedback: bool,
        living: Values | None = None,
        only: Sequence[str] | None = None,
    ) -> Values:
        """Return the average of the workers' values, as it is sent. `only`: of these tensors."""
        found = {name: torch.empty_like(value) for name, value in values[0].items()}
        alive = living or {n: torch.ones_like(v, dtype=torch.bool) for n, v in found.items()}
        for layer in self.layers:
            if only is not None and layer.parameters[0].name not in only:
                continue
            for rank in range(self.tensor):
                layout = self._layout(layer, rank)
                flats = [_flat(layout, of_worker) for of_worker in values]
                lives = _flat(layout, {n: a.float() for n, a in alive.items()}) > 0
                exact = _exact(layout) if self.tensor > 1 else torch.zeros_like(lives)
                mean = torch.empty(layout.size)
                for shard in range(self.shards):
                    cut = layout.shard(shard)
                    key = layer.name, rank, shard
                    if key not in self._exchanges or self._exchanges[key].form != form:
                        length = layout.shard_size
                        self._exchanges[key] = Exchange(form, feedback, self.workers, length)
                    # the padding takes part where nothing says what lives
                    shown = lives[cut] if living else torch.ones_like(lives[cut])
                    mean[cut] = self._exchanges[key](
                        [flat[cut] for flat in flats], exact[cut], shown
                    )
                for slot in layout.slots:
                    whole = found[slot.parameter.name].view(slot.parameter.divided)
                    part = mean[slot.offset : slot.stop]
                    whole[slot.held] = part.view(whole[slot.held].shape)
        return found


class Adam:
    """AdamW as `hpczero_kernels.adamw` has it, on whole tensors."""

    def __init__(self, spec: Spec, decays: dict[str, bool]) -> None:
        self.spec = spec
        self.decays = decays
        self.first: Values = {}
        self.second: Values = {}

    def step(self, model: nn.Module, gradient: Values, step: int) -> None:
        clipped(gradient, self.spec.train.grad_clip)
        optimizer = self.spec.optimizer
        beta1, beta2 = optimizer.betas
        lr = learning_rate(self.spec, step)
        for name, weight in values_of(model).items():
            g = gradient[name]
            m = self.first.setdefault(name, torch.zeros_like(g))
            v = self.second.setdefault(name, torch.zeros_like(g))
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            roots = (v / (1 - beta2 ** (step + 1))).sqrt() + optimizer.eps
            weight.mul_(1 - lr * (optimizer.weight_decay if self.decays[name] else 0.0))
            weight.sub_(lr / (1 - beta1 ** (step + 1)) * m / roots)


def clipped(gradient: Values, clip: float) -> None:
    norm = torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt()
    for g in gradient.values():
        g.mul_(min(1.0, clip / (float(norm) + 1e-6)))


def values_of(model: nn.Module) -> Values:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _initial(spec: Spec) -> nn.Module:
    model: nn.Module = build.on_meta(spec.model)
    made = {}
    for layer in families.layers(spec.model):
        for parameter in layer.parameters:
            values = torch.empty(parameter.shape)
            build.initial_values(parameter, spec.seed, 0, values)
            made[parameter.name] = nn.Parameter(values)
    build.install_parameters(model, made)
    return model


def _flat(layout: UnitLayout, values: Values) -> Tensor:
    flat = torch.zeros(layout.size)
    for slot in layout.slots:
        whole = values[slot.parameter.name].view(slot.parameter.divided)
        flat[slot.offset : slot.stop] = whole[slot.held].reshape(-1)
    return flat


def _exact(layout: UnitLayout) -> Tensor:
    exact = torch.zeros(layout.size, dtype=torch.bool)
    for slot in layout.slots:
        exact[slot.offset : slot.stop] = not slot.is_split
    return exact
