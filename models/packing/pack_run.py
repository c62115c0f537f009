"""One run of packing over a source: everything not finished in the journal is packed, layer after layer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, loses
from ..families.derived import Derived
from ..pack import learned_predictor
from ..pack.manifest import COPIED, DRAFT, Manifest, file_entry, layer_file
from ..pack.quantize import by_hqq, quantize
from ..pack.table import Table, mapped
from ..pack.tensor_file import TensorFile, write_tensors
from ..pack.widths import CALIBRATED
from .dense_part import FILE as DENSE_FILE
from .dense_part import DensePart
from .draft_part import DraftPart
from .journal import Journal, lost
from .layer_pass import Called, LayerPass, WholePass
from .pack_experts import PackingExperts, measures_name, measures_plan
from .reading_order import ReadingOrder
from .rounding import Hessians, round_for

PackReport = Callable[[str, float, float | None], None]
PROFILE = "profile.safetensors"
CONTINUES = "Continuing the interrupted pack"  # the first step that is reported then
_STATE = "state"  # of calibration where a layer ends
_FIRST, _LAST = 0.005, 0.985  # shares of the progress: before the first layer, after the last one


class Packing:
    """One run of packing: from the start, or from where the journal ends.

    Args:
        device: that quantizes. until: layers to be packed; those after it are finished. draft: the drafting head, if it
            is to be packed.
    """

    def __init__(
        self,
        source: Checkpoint,
        manifest: Manifest,
        folder: Path,
        journal: Journal,
        dense: DensePart,
        device: str,
        progress: PackReport,
        until: int | None = None,
        draft: DraftPart | None = None,
    ) -> None:
        self._source, self._manifest, self._folder, self._journal = source, manifest, folder, journal
        self._dense, self._device, self._draft = dense, device, draft
        self._layers, self._experts = manifest.architecture.layers, manifest.architecture.experts
        # The decoder's layers, among which some may have no experts.
        self._decoders = source.config.num_hidden_layers
        self._until = self._decoders if until is None else source.layers[until - 1] + 1 if until else 0
        self._clock = _Clock(progress)
        self._training = learned_predictor.Training(self._layers, self._told)
        self._order = ReadingOrder(source, self._steps())

    def run(self, tokens: Tensor, small: list[Path]) -> Manifest:
        """The finished pack's manifest. tokens: (N, T) calibration text. small: files to copy as published."""
        if self._journal.resumed:
            self._clock.say(CONTINUES)
        with self._dense_file() as file, ThreadPoolExecutor(1, "hash") as hashing:
            for number, table in enumerate(self._dense.tables, 1):
                self._store_table(table, f"Storing table {number} of {len(self._dense.tables)}")
            self._store_dense(file, 0)
            first, hidden = self._restore()
            hashes = [self._hash(hashing, table.file) for table in self._dense.tables]
            hashes += [self._hash(hashing, layer_file(layer)) for layer in range(self._packed(first))]

            def packed(layer: int) -> None:
                hashes.append(self._hash(hashing, layer_file(layer)))

            if isinstance(self._source.family, Derived):
                self._whole(file, tokens, packed)
            else:
                self._by_layers(file, tokens, packed, first, hidden)
            for stage in range(self._until + 1, self._decoders + 2):
                self._store_dense(file, stage)
            self._clock.say("Writing the profile", _LAST)
            hashes.append(self._hash(hashing, DENSE_FILE))
            if PROFILE not in self._journal.files:
                self._write_profile()
            if self._draft is not None:
                self._write_draft(self._draft)
                hashes.append(self._hash(hashing, DRAFT))
            for path in small:
                shutil.copyfile(path, self._folder / path.name)
            self._clock.say("Checking what was written", 0.99)
            for hashed in hashes:
                hashed.result()
        self._finish()
        return self._manifest

    def _by_layers(
        self, file: TensorFile, tokens: Tensor, packed: Callable[[int], None], first: int, hidden: Tensor | None
    ) -> None:
        """From layer `first` on, which hidden (N, T, H) enters; None: nothing was finished."""
        passing = LayerPass(self._source.config, self._source.family, self._manifest.widths.dense)
        if hidden is None:
            hidden = passing.embed(self._dense, file, tokens)
        for decoder in range(first, self._until):
            self._store_dense(file, decoder + 1, partial(passing.calibrate, hidden=hidden))
            if decoder not in self._source.layers:
                hidden = passing.run(passing.layer(decoder, self._dense, file, None), hidden)
                continue
            layer = self._packed(decoder)
            hidden = passing.run(self._layer(passing, file, layer), hidden)
            state = {"layers": torch.tensor([decoder + 1]), "hidden": hidden}
            if self._training.before is not None:
                state |= dict(zip(("given", "chosen", "norm"), self._training.before, strict=True))
            self._journal.keep(_STATE, state)
            packed(layer)

    def _whole(self, file: TensorFile, tokens: Tensor, packed: Callable[[int], None]) -> None:
        """All layers, finished ones too, from the pack: nothing is kept at their borders."""

        def reached(decoder: int, called: Called | None) -> bool:
            if decoder - 1 in self._source.layers:
                packed(self._packed(decoder - 1))
            if called is None or decoder >= self._until:
                return False
            self._store_dense(file, decoder + 1, partial(passing.calibrate, called=called))
            if decoder in self._source.layers:
                self._layer(passing, file, self._packed(decoder))
            else:
                passing.layer(decoder, self._dense, file, None)
            return True

        lookups = {table.name: mapped(table, self._folder) for table in self._dense.tables}
        passing = WholePass(self._source.config, self._source.family, self._manifest.widths.dense, reached, lookups)
        passing.run(self._dense, file, tokens)

    def _finish(self) -> None:
        signals = [self._journal.signals.get(layer, "up") for layer in range(self._layers)]
        whole = tuple(layer for layer in range(self._layers) if self._journal.whole.get(layer))
        source, lost = self._manifest.source, self._journal.loses
        source = replace(source, exact=source.exact and not lost, loses=source.loses or lost)
        signals = () if set(signals) == {"up"} else tuple(signals)
        self._manifest = replace(self._manifest, source=source, signals=signals, whole=whole)
        tables = (table.file for table in self._dense.tables)
        files = (DENSE_FILE, *tables, PROFILE, *(layer_file(layer) for layer in range(self._layers)), *COPIED)
        for file in files:
            if (self._folder / file).is_file():
                self._manifest.files[file] = self._journal.files.get(file) or file_entry(self._folder / file)
        if self._draft is not None:
            self._manifest.beside[DRAFT] = self._journal.files[DRAFT]
        self._manifest.write(self._folder)
        self._clock.say("Done", 1.0)

    def _steps(self) -> dict[Hashable, list[str]]:
        """What is left to read of the source, in order."""
        parts = (part for parts in self._source.tables.values() for part in parts if part not in self._journal.dense)
        steps: dict[Hashable, list[str]] = {("table", part): [part] for part in parts}
        for stage, names in enumerate(self._dense.stages):
            steps["dense", stage] = [name for name in names if name not in self._journal.dense]
            if stage - 1 in self._source.layers:
                layer, names = self._packed(stage - 1), self._source.expert_names
                left = [e for e in range(self._experts) if (layer, e) not in self._journal.experts]
                steps |= {(layer, expert): names(stage - 1, expert) for expert in left}
        if self._draft is not None and DRAFT not in self._journal.files:
            steps |= self._draft.steps()
        return steps

    def _packed(self, decoder: int) -> int:
        """How many of the layers before one of the decoder's have experts."""
        return sum(layer < decoder for layer in self._source.layers)

    @contextmanager
    def _dense_file(self) -> Generator[TensorFile]:
        begun = not self._journal.dense.isdisjoint(self._source.dense_names())
        with self._begun(lambda: self._dense.open(self._folder, resume=begun)) as file:
            yield file

    def _begun(self, opened: Callable[[], TensorFile]) -> TensorFile:
        try:
            return opened()
        except ValueError as error:
            raise lost(self._folder, f"{error}.") from error

    def _store_table(self, table: Table, step: str) -> None:
        """Part by part, so that memory need not hold it; then it is looked up in as it is stored."""
        start, parts = 0, self._source.tables[table.name]
        begun = not self._journal.dense.isdisjoint(parts)
        with self._begun(lambda: self._dense.open_table(self._folder, table, resume=begun)) as file:
            for part in parts:
                rows = self._source.places[part][1].shape[0]
                if part not in self._journal.dense:
                    self._clock.say(f"{step}, {start / table.rows:.0%}")
                    tensor = self._dense.read(part)
                    if loses(tensor, table.float16):
                        self._journal.note_loses(f"{table.name}.weight")
                    self._dense.store_part(file, table, tensor, start)
                    file.flush()
                    self._journal.note_dense([part])
                self._order.finished(("table", part))
                start += rows

    def _store_dense(self, file: TensorFile, stage: int, calibrate: Callable[..., None] | None = None) -> None:
        """Linear layers are rounded for what they are given where the layer is run as published, by `calibrate`."""
        left = {name: self._dense.read(name) for name in self._dense.stages[stage] if name not in self._journal.dense}
        if left:
            calibrated = self._manifest.widths.rounding == CALIBRATED
            layers = self._dense.rounded(stage) if calibrate is not None and calibrated else {}
            found, hessians = set[str](), Hessians()

            def rounded(layer: str, matrix: Tensor, x: Tensor) -> Tensor:
                self._clock.say(f"Rounding the attention of layer {stage} of {self._decoders}")
                self._dense.store(file, layers[layer], matrix, partial(round_for, hessians(x)))
                found.add(layers[layer])
                return self._dense.values(file, layers[layer])

            if calibrate is not None and layers:
                calibrate(stage - 1, left, rounded=rounded)
            for name, tensor in left.items():
                if name in self._dense.plan and loses(tensor, self._dense.plan[name][0]):
                    self._journal.note_loses(name)
                if name not in found:
                    self._dense.store(file, name, tensor, quantize if calibrated else by_hqq)
            file.flush()
            self._journal.note_dense(list(left))
        self._order.finished(("dense", stage))

    def _layer(self, passing: LayerPass | WholePass, file: TensorFile, layer: int) -> Any:
        """The decoder's layer with these experts, which packs them when it is called."""
        step = f"Packing layer {layer + 1} of {self._layers}"

        def given(x: Tensor, chosen: Tensor) -> None:
            known = len(self._training.learned)
            self._training.reach(layer, x, chosen, scores_by, norm)
            for index, found in enumerate(self._training.learned[known:], known):
                self._journal.keep(ahead_name(index), learned_predictor.to_tensors(found))
            self._clock.say(step)

        def packed(expert: int) -> None:
            self._order.finished((layer, expert))
            self._clock.say(step, _share((layer + (expert + 1) / self._experts) / self._layers))

        self._clock.start(_share(layer / self._layers))
        self._clock.say(step)
        experts = PackingExperts(
            self._source, self._manifest, self._folder, self._journal, layer, self._device, given, packed
        )
        family, decoder = self._source.family, self._source.layers[layer]
        module = passing.layer(decoder, self._dense, file, experts)
        scores_by, norm = family.foresight(module, self._manifest.architecture.hidden)
        return module

    def _restore(self) -> tuple[int, Tensor | None]:
        """How many of the decoder's layers are finished, and the state that left the last of them (N, T, H)."""
        while (found := self._journal.kept(ahead_name(len(self._training.learned)))) is not None:
            self._training.learned.append(learned_predictor.from_tensors(found))
        state = self._journal.kept(_STATE)
        if state is None:
            return 0, None
        layers = int(state["layers"])
        if "given" in state:
            self._training.before = state["given"], state["chosen"], state["norm"]
        for layer in range(self._packed(layers)):
            name = layer_file(layer)
            path, noted = self._folder / name, self._journal.files.get(name)
            if not path.is_file():
                raise lost(self._folder, f"{name} is missing.")
            if noted is not None and (size := path.stat().st_size) != noted.size:
                raise lost(self._folder, f"{name} has {size:,} bytes instead of {noted.size:,}.")
            every = {(layer, expert) for expert in range(self._experts)}
            if layer not in self._journal.signals or not every <= self._journal.experts:
                raise lost(self._folder, f"Its journal lacks lines of layer {layer + 1}, which is finished.")
        return layers, state["hidden"]

    def _hash(self, pool: ThreadPoolExecutor, name: str) -> Future[None]:
        """Hash a finished file beside the packing, while it is still in the system's cache."""

        def hash_it() -> None:
            if name not in self._journal.files:
                self._journal.note_file(name, file_entry(self._folder / name))

        return pool.submit(hash_it)

    def _write_profile(self) -> None:
        plan = measures_plan(self._manifest.architecture)
        measures = [self._journal.kept(measures_name(layer), plan) for layer in range(self._layers)]
        if None in measures:
            raise lost(self._folder, f"{measures_name(measures.index(None))} is missing.")
        names = ("popularity", "router_score")
        stacked = {name: torch.stack([layer[name] for layer in measures if layer]) for name in names}
        write_tensors(self._folder / PROFILE, stacked | self._training.tensors())

    def _write_draft(self, draft: DraftPart) -> None:
        """From its start, if it was interrupted: it takes about as long as a layer."""
        if DRAFT in self._journal.files:
            return

        def read(step: Hashable, share: float) -> None:
            self._order.finished(step)
            self._clock.say(f"Packing the drafting head, {share:.0%}", _LAST)

        self._clock.say("Packing the drafting head", _LAST)
        draft.write(self._folder / DRAFT, read)

    def _told(self, layer: int) -> None:
        self._clock.say(f"Training the predictor after layer {layer + 1} of {self._layers}")


class _Clock:
    """Reports how far packing is and, by what was done since it was started, the seconds left."""

    def __init__(self, progress: PackReport) -> None:
        self._progress, self._share = progress, 0.0
        self._begun: tuple[float, float] | None = None

    def start(self, share: float) -> None:
        """From here on work takes time in proportion; a second start changes nothing."""
        self._share = max(self._share, share)
        self._begun = self._begun or (time.monotonic(), share)

    def say(self, step: str, share: float = 0.0) -> None:
        self._share = max(self._share, share)
        left = None
        if self._begun is not None and self._begun[1] < self._share < 1:
            rate = (time.monotonic() - self._begun[0]) / (self._share - self._begun[1])
            left = rate * (1 - self._share)
        self._progress(step, self._share, left)


def _share(layers: float) -> float:
    """The share of packing that is done when that share of the layers is."""
    return _FIRST + (_LAST - _FIRST) * layers


def ahead_name(layer: int) -> str:
    """The working file that keeps what was learned of looking ahead from a layer."""
    return f"ahead_{layer:02d}"
