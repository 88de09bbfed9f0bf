"""Opens the fast path of a loaded model, or says why the model has none."""

import dataclasses
import functools
from collections.abc import Callable, Collection

import mlx.core as mx

from services.rank_worker.device.description import DeviceKind
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.kv_cache.rows.kv_shapes import ModelShape
from services.rank_worker.model.fast_path.any_form import proof as family_proof
from services.rank_worker.model.fast_path.any_form.family_layers import (
    FamilyForm,
    FamilyLayers,
    read_family_form,
)
from services.rank_worker.model.fast_path.expert_opening import open_expert_kernels
from services.rank_worker.model.fast_path.kernels.faults import first_line
from services.rank_worker.model.fast_path.kernels.kernels import Kernels, Shape
from services.rank_worker.model.fast_path.kernels.peer_sums import open_peer_sums
from services.rank_worker.model.fast_path.known_form.forms import StackForm, read_form
from services.rank_worker.model.fast_path.known_form.layer_stack import LayerStack
from services.rank_worker.model.fast_path.known_form.proof import (
    depends_on_other_rows,
    find_difference,
    find_difference_of_prompts,
)
from services.rank_worker.model.fast_path.merged_linear import packed_bits
from services.rank_worker.model.fast_path.row_tiles import tile_head
from services.rank_worker.model.fast_path.unknown_form import UnknownForm
from services.rank_worker.model.forward import Forward
from services.rank_worker.model.sharding.head_split import find_head
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.peers.peer_memory import OpenPeerMemory, open_peer_memory
from shared.configuration.rank_settings import RankWorkerConfig
from shared.errors import ConfigError
from shared.log import Log
from shared.messages.rank_link import Backend

_log = Log("rank_worker.fast_path")

_KERNEL_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class FastPathSettings:
    """Whether and how a rank opens the fast path."""

    device: DeviceKind = "cpu"
    all_agree: Callable[[bool], bool] = bool
    """Tells whether a statement holds on all ranks; a collective, as all ranks compute alike."""
    ranks: int = 1
    """Number of ranks."""
    open_memory: OpenPeerMemory | None = None
    """Opens memory in which kernels sum over ranks; None: collectives do."""
    keeps_layers: bool = False
    """mlx-lm's code computes the layers, and kernels only attend and multiply."""
    prompts_in_place: bool = False
    """Kernels also write the rows of prompts, where they can."""
    batch_invariant: bool = False
    """What a decode computes for a row must not depend on the other rows."""


def fast_path_settings(
    config: RankWorkerConfig, device: DeviceKind, backend: Backend, world: Collectives
) -> FastPathSettings | None:
    """Return how a rank opens the fast path; None if it is switched off.

    Args:
        config: the rank's settings.
        device: kind of its device.
        backend: of the collectives.
        world: all ranks.
    """
    if config.fast_path == "off":
        return None
    # With this backend all ranks are CUDA, and each has a GPU of its own.
    shares_memory = config.peer_memory and backend == "nccl"
    return FastPathSettings(
        device,
        world.all_agree,
        world.world_size,
        functools.partial(open_peer_memory, world) if shares_memory else None,
        keeps_layers=config.fast_path == "attention",
        prompts_in_place=config.prompts_in_place,
        batch_invariant=config.batch_invariant,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FastPath:
    """The fast path of a model, or why it has none."""

    layers: LayerStack | FamilyLayers | None
    """Computes the model's layers; None: mlx-lm's code does."""
    state: str
    """How the layers are computed, for operators."""


def open_fast_path(
    forward: Forward,
    store: KVStore,
    shape: ModelShape,
    settings: FastPathSettings | None,
    kv_bits: int,
) -> FastPath:
    """Give a model's forward the highest level of the fast path that the proof finds equal.

    All ranks call this at the same point, and get the same result. Waits for the device.

    Args:
        forward: of the loaded model.
        store: its rows; told whether kernels write them in place, also those of prompts, and
            whether chunks can be concatenated.
        shape: the result of `read_shape`.
        settings: of this rank; None: the fast path is switched off.
        kv_bits: bits per number of stored KV; 0: the model's own dtype.

    Raises:
        ConfigError: a decode must compute the same for a row beside any other rows, and here it
            would not.
    """
    found = FastPath(None, "mlx-lm's layers")
    if settings is not None:
        found = _Opening(forward, shape, settings, kv_bits).open()
    layers = found.layers
    if forward.inner is not None:
        forward.use_layers(layers)
    if layers is not None:
        store.serve_layers(
            writes_in_place=layers.has_kernels,
            prefills_in_place=layers.prefills_in_place,
            can_concatenate=layers.can_concatenate,
        )
    _log.info("fast_path", detail=found.state)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Opening:
    """Opens the highest level that serves a model. Its methods run the same collectives everywhere.

    Those that return None beside a text say why: operators see it, where it is not "".
    """

    forward: Forward
    """Of the loaded model."""
    shape: ModelShape
    """The result of `read_shape`."""
    settings: FastPathSettings
    """Of this rank."""
    kv_bits: int
    """Bits per number of stored KV; 0: the model's own dtype."""

    def open(self) -> FastPath:
        """Open experts' kernels, and then the layers.

        Raises:
            ConfigError: as `open_fast_path` does.
        """
        settings = self.settings
        experts = open_expert_kernels(
            self.forward.model, settings.device, settings.all_agree, self.forward.expert_counter
        )
        found = self._open_known()
        if found.layers is None:
            found = self._open_any(found.state)
        if experts:
            found = FastPath(found.layers, f"{found.state}; {experts}")
        if settings.batch_invariant:
            self._make_invariant(found)
        return found

    def _open_known(self) -> FastPath:
        """Open the layers of a known form; without them the state is why they do not serve."""
        settings, inner = self.settings, self.forward.inner
        form, reason = self._read_form()
        if not settings.all_agree(form is not None):
            return FastPath(None, reason or "another rank has no fast path")
        assert form is not None
        assert inner is not None
        weight = form.norm.weight
        shapes = {one.attention.shape for one in form.layers}
        kernels, fault = self._open_kernels(shapes, weight.dtype, weight.size)
        stack, reason = self._make_stack(form, kernels)
        if not settings.all_agree(stack is not None):
            return FastPath(None, reason or "another rank has a fault")
        assert stack is not None
        how_sums = self._open_sums(stack, weight.size, weight.dtype)
        layers = self.shape.layers()
        difference = find_difference(stack, inner, self.forward.plain, layers, self.kv_bits)
        if not settings.all_agree(difference is None):
            return FastPath(None, difference or "a difference on another rank")
        if kernels is not None:
            prompts = self._try_prompts(stack, kernels)
            return FastPath(stack, f"fast path with kernels{how_sums}{prompts}")
        return FastPath(stack, f"fast path without kernels: {fault}" if fault else "fast path")

    def _read_form(self) -> tuple[StackForm | None, str]:
        """Return the model's form; None, and why, if it is unknown or not wanted."""
        inner, shape = self.forward.inner, self.shape
        if self.settings.keeps_layers:
            return None, 'rank_worker.fast_path is "attention"'
        if inner is None or not shape.is_plain:
            return None, "the model keeps other state than keys and values"
        try:
            return read_form(inner, shape.layers()), ""
        except UnknownForm as unknown:
            return None, str(unknown)

    def _make_stack(
        self, form: StackForm, kernels: Kernels | None
    ) -> tuple[LayerStack | None, str]:
        """Merge the weights and compile products, whose kernels have not run with such shapes yet.

        Raises:
            ConfigError: rows cannot be independent of each other.
        """
        invariant = self.settings.batch_invariant
        stack = LayerStack(
            form,
            kernels,
            self.forward.expert_counter,
            on_cpu=self.settings.device == "cpu",
            batch_invariant=invariant,
        )
        if invariant and not stack.has_plain_matrices:
            raise _refusal("this model's layers have experts, adapters or divided biases")
        try:
            stack.compile_products()
        except (RuntimeError, ValueError) as error:
            return None, f"a product does not run ({first_line(error)})"
        return stack, ""

    def _try_prompts(self, stack: LayerStack, kernels: Kernels) -> str:
        """Leave the kernels that write prompts in place if they compute anything else than mlx-lm.

        Returns:
            Text about prompts that is appended to the state that operators see, or "".
        """
        if not stack.prefills_in_place:
            return ""
        assert self.forward.inner is not None
        difference = find_difference_of_prompts(stack, self.forward.inner, self.shape.layers())
        if self.settings.all_agree(difference is None):
            return "; kernels attend to prompts too"
        difference = difference or "a difference on another rank"
        kernels.leave_prompts(difference)
        return f"; MLX attends to prompts: {difference}"

    def _open_sums(self, stack: LayerStack, dim: int, dtype: mx.Dtype) -> str:
        """Have kernels sum over ranks, if they can and the layers have such sums.

        Returns:
            Text that is appended to the state that operators see, or "".
        """
        settings = self.settings
        if settings.open_memory is None or not (stack.has_kernels and stack.has_sums_over_ranks):
            return ""
        stack.sums, fault = open_peer_sums(
            settings.open_memory, settings.all_agree, settings.ranks, dim, dtype
        )
        return f"; NCCL sums over ranks: {fault}" if fault else " that sum over ranks"

    def _open_any(self, obstacle: str) -> FastPath:
        """Open kernels of attention for mlx-lm's layers.

        Args:
            obstacle: why the layers are not of a known form.
        """
        all_agree = self.settings.all_agree

        def kept(reason: str) -> FastPath:
            state = f"mlx-lm's layers: {obstacle}"
            return FastPath(None, f"{state}; {reason}" if reason else state)

        form, reason = self._read_family_form()
        if not all_agree(form is not None):
            return kept(reason)
        assert form is not None
        layers = self.shape.layers()
        kernels, fault = self._open_kernels(
            {one.shape for one in form.attentions}, layers[0][0].dtype
        )
        if kernels is None:
            return kept(fault)
        family, fault = self._make_family(form, kernels)
        if not all_agree(family is not None):
            return kept(fault or "another rank has a fault")
        assert family is not None
        difference = family_proof.find_difference(family, self.forward.plain, layers, self.kv_bits)
        if not all_agree(difference is None):
            return kept(difference or "a difference on another rank")
        return FastPath(family, f"mlx-lm's layers, attention with kernels: {obstacle}")

    def _read_family_form(self) -> tuple[FamilyForm | None, str]:
        """Return the form of mlx-lm's layers; None, and why, if kernels cannot serve them."""
        inner, shape = self.forward.inner, self.shape
        if self.settings.device == "cpu" or inner is None or not shape.is_plain:
            return None, ""
        try:
            return read_family_form(self.forward.plain, inner, shape.layers()), ""
        except UnknownForm as unknown:
            return None, str(unknown)

    def _make_family(self, form: FamilyForm, kernels: Kernels) -> tuple[FamilyLayers | None, str]:
        """Return a family's layers with kernels; None, and why, if they cannot serve.

        The family's code runs here with other caches than its own, so any error is a reason.
        """
        forward = self.forward
        assert forward.inner is not None
        try:
            family = FamilyLayers(
                forward.plain, forward.inner, form, kernels, forward.expert_counter
            )
            fault = family_proof.find_fault(family, self.shape.layers(), self.kv_bits)
        except Exception as error:  # noqa: BLE001 - see above
            return None, f"a decode cannot be built ({error!r})"
        return (None, fault) if fault else (family, "")

    def _open_kernels(
        self, shapes: Collection[Shape], dtype: mx.Dtype, dim: int = 0
    ) -> tuple[Kernels | None, str]:
        """Return kernels that all ranks can use; None, with the cause, if a rank cannot.

        Args:
            shapes: of the attentions, each once.
            dtype: of the model.
            dim: as for `Kernels.find_fault`.
        """
        settings, kernels, fault = self.settings, None, ""
        if settings.device != "cpu" and dtype not in _KERNEL_DTYPES:
            fault = f"the model is {dtype}"
        elif settings.device != "cpu":
            assert self.forward.inner is not None
            kernels = Kernels(
                settings.device, self.kv_bits, prompts_in_place=settings.prompts_in_place
            )
            fault = kernels.find_fault(shapes, dtype, dim, packed_bits(self.forward.inner))
        # A rank on a CPU votes too: beside it no rank has kernels.
        has_kernels = settings.all_agree(kernels is not None and not fault)
        if kernels is None or not has_kernels:
            return None, fault or ("" if settings.device == "cpu" else "another rank has none")
        kernels.keep_common(settings.all_agree)
        return kernels, ""

    def _make_invariant(self, found: FastPath) -> None:
        """Make the head independent of other rows, as the layers are already.

        Raises:
            ConfigError: something depends on other rows.
        """
        forward, shape, stack = self.forward, self.shape, found.layers
        head = find_head(forward.model, shape.vocab_size)
        if not isinstance(stack, LayerStack):
            raise _refusal(f"this model is computed by {found.state}")
        if head is None:
            raise _refusal("this model's head is not found")
        tile_head(head)
        if depends_on_other_rows(stack, forward.head, shape.layers(), self.kv_bits):
            raise _refusal("on this device the matrix library's sums depend on other rows")


def _refusal(obstacle: str) -> ConfigError:
    return ConfigError(f"rank_worker.batch_invariant is true, but {obstacle}: set it to false.")
