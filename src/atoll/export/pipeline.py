"""The ensemble as a diffusers pipeline: components of a folder, pictures from a call."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import BaseOutput, is_accelerate_available
from torch import Tensor, nn

from atoll.base.errors import ConfigError
from atoll.base.pictures import to_images
from atoll.encoders.registry import text_parts, with_tokenizers, without_reports
from atoll.encoders.text import TextEncoder, prompt_length
from atoll.encoders.vae import Autoencoder, constants_of
from atoll.export.bank import ExpertBank
from atoll.export.call import Call, check_flow, checked_latents, set_times
from atoll.export.encoders import by_name, cast, check_encoders
from atoll.export.push import push_folder
from atoll.model.bank import Bank
from atoll.model.card import Card
from atoll.model.checkpoint import use_default_permissions
from atoll.model.dispatch import Costs, Trace
from atoll.model.expert import RouterModel
from atoll.model.folder import OTHERS, PICTURE, PRETRAIN_PART, FolderWriter
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.model.opened import Chosen, border, check_router, mark_incomplete, open_folder, output_folder
from atoll.model.routing import PRETRAIN, Routing
from atoll.networks.router import Router

logger = logging.getLogger(__name__)
NOT_TAKEN = {
    "custom_pipeline": "this class is the pipeline, and no code is fetched",
    "trust_remote_code": "no code is fetched",
    "variant": "there are none; give torch_dtype",
    "device_map": "call .to(device) or .enable_model_cpu_offload()",
    "quantization_config": "quantise the components after loading",
    "use_onnx": "only safetensors are read",
}
"""Options of diffusers' `from_pretrained`, and what is done instead."""


@dataclass
class AtollPipelineOutput(BaseOutput):  # type: ignore[misc]
    """What a call gives.

    Attributes:
        images: PIL images, an array `(B, H, W, C)` or a tensor `(B, C, H, W)` in [0, 1], or latents.
        routing: who served which picture (`routing.stacked()`: steps, pictures, experts), and what that cost.
    """

    images: Any
    routing: Trace


class AtollPipeline(DiffusionPipeline):  # type: ignore[misc]
    """K experts and a router that sample as one model.

    Args:
        experts: the bank of experts.
        router: says which expert knows a noisy picture; with its card.
        scheduler: any diffusers scheduler of flows.
        vae: autoencoder of the latents; None where pixels are the latents.
        text_encoder: text tower; None without text. Of SD3 and Flux there are more.
        num_inference_steps: of a call that names none, as guidance (1 is none) and routing are.
    """

    # The router is left out: in the sequence, its call at each step would send the experts back to the CPU.
    model_cpu_offload_seq = "text_encoder->text_encoder_2->text_encoder_3->experts->vae"
    _optional_components = [*OTHERS[1:]]
    _callback_tensor_inputs = ["latents"]

    def __init__(
        self,
        experts: ExpertBank,
        router: Router,
        scheduler: Any,
        vae: AutoencoderDC | AutoencoderKL | AutoencoderTiny | None = None,  # `from_pipe` goes by the type
        text_encoder: nn.Module | None = None,
        tokenizer: Any = None,
        text_encoder_2: nn.Module | None = None,
        tokenizer_2: Any = None,
        text_encoder_3: nn.Module | None = None,
        tokenizer_3: Any = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 2.0,
        routing: str = "once",
    ) -> None:
        super().__init__()
        if not isinstance(router.card, Card):
            raise ConfigError("the router has no card", "load it with AtollPipeline.from_pretrained")
        # Parts of two campaigns fit in shape and draw nonsense, so the cards decide.
        check_router(router.card, experts.every_card, len(experts), router.config.num_experts)
        given = dict(locals())
        others = {name: given[name] for name in OTHERS}
        check_encoders(router.card, others)
        check_flow(scheduler)
        self.register_modules(experts=experts, router=router, **others)
        self.register_to_config(
            num_inference_steps=num_inference_steps,
            guidance_scale=float(guidance_scale),
            routing=str(Routing.named(routing)),
        )
        if experts.residency is not None:  # brought one by one: the bank has no parameter to ask for a device
            self._exclude_from_cpu_offload = ["experts"]
            self.model_cpu_offload_seq = self.model_cpu_offload_seq.replace("experts", "router")
        self.about: Mapping[str, Any] = {}
        self.picture: bytes | None = None
        self._told_of: Mapping[str, str] = {}
        self._interrupt, self._num_timesteps, self._guidance = False, 0, guidance_scale

    @property
    def card(self) -> Card:
        """The router's card: condition, shape, latents and text encoder of all parts."""
        card: Card = self.router.card
        return card

    # What callbacks read of the call in hand, by diffusers' names; `pipe._interrupt = True` stops it.
    guidance_scale = property(lambda self: self._guidance)
    num_timesteps = property(lambda self: self._num_timesteps)
    interrupt = property(lambda self: self._interrupt)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: int | Sequence[int] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        routing: str | Routing | None = None,
        clusters: Sequence[int] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        truncate_prompt: bool = False,
        height: int | None = None,
        width: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> AtollPipelineOutput | tuple[Any, Trace]:
        """Pictures of prompts, of class labels, or of nothing, as the experts were trained.

        Args:
            prompt: one text or several, as `class_labels` are one label or several.
            negative_prompt: what guidance leads away from, one for all or one for each.
            num_images_per_prompt: pictures of each prompt or label, or in all without either.
            num_inference_steps: steps, not calls: Heun calls the experts twice in a step.
            guidance_scale: classifier-free guidance; 1 is none, and 0 too. The pipeline's own by default.
            generator: one, or one for each picture. A fresh one seeded with S gives the pictures that seed S
                gives everywhere; used again it goes on to others. A list gives each picture the first one of
                its own generator.
            latents: starting noise `(B, C, H, W)` in place of the generator's.
            routing: strategy, such as "top-1", "once", "top-2 every 5" or "once null sample-1".
            clusters: cluster of every picture, for routing "oracle".
            prompt_embeds: text states `(N, L, D)` in place of prompts, with their mask `(N, L)`.
            negative_prompt_embeds: states of the empty text, with `prompt_embeds`, and their mask.
            truncate_prompt: cut texts that are too long, as training did, instead of refusing them.
            height: of the pictures in pixels, with `width`: one of the sizes that the model was trained on.
                Without both, the one that is nearest to a square.
            output_type: "pil", "np", "pt" or "latent".
            return_dict: whether the result has names; otherwise it is the tuple (images, routing).
            callback_on_step_end: called as `(pipe, step, timestep, {"latents": ...})` after every step; what
                it returns under "latents" is gone on from.

        Raises:
            ConfigError: an argument that does not fit the model; before anything is computed.
        """
        given = dict(locals())  # nothing but the arguments is there yet
        del given["self"]
        own = ("num_inference_steps", "guidance_scale", "routing")
        given |= {name: self.config[name] for name in own if given[name] is None}
        inputs = getattr(callback_on_step_end, "tensor_inputs", callback_on_step_end_tensor_inputs)
        call = Call.of(**{**given, "callback_on_step_end_tensor_inputs": inputs})
        generation, bank, scheduler = call.generation, self.experts, self.scheduler
        if generation.guidance == 0 and not self.card.shape.guidance:
            # As in diffusers, whose users turn guidance off by 0; the formula would leave the prompt out.
            generation = generation.with_(guidance=1.0)
        generation.routing.check(len(bank), bank.pretrain is not None)
        if call.output_type != "latent" and self._lacks_vae:
            what = f"the pipeline was loaded without its VAE {self.card.latents['name']!r}"
            raise ConfigError(what, "load it, or give output_type='latent'")
        model = self._model
        shape = model.shape_for(generation.size)
        scheduler, total = set_times(scheduler, generation.steps, shape)
        conditions = call.conditions(model, self.text_encoder is not None)
        known = call.labels(conditions.count, len(bank))
        if latents is not None:
            latents = checked_latents("latents", latents, (conditions.count, *shape))
        sampling = model.sampling(
            conditions,
            generation,
            labels=None if known is None else torch.tensor(known, device=model.device),
            positions=call.positions(conditions.count),
            noise=latents,
        )
        # One batch in the order of the numbers: callbacks look at it between the steps.
        numbers, drawn_by = range(conditions.count), {"scheduler": scheduler, "generator": call.generator}
        sampler = sampling.start(model.bank, numbers, **drawn_by)
        self._interrupt, self._num_timesteps, self._guidance = False, total, generation.guidance
        # Not `sampler.run`: whoever calls may look at every step, change the state, or stop.
        with self.progress_bar(total=total) as bar:
            for step in range(total):
                timestep = scheduler.timesteps[step * scheduler.order]
                sampler.advance()
                if callback_on_step_end is not None:
                    state = dict.fromkeys(inputs, sampler.x)
                    answer = callback_on_step_end(self, step, timestep, state) or {}
                    if "latents" in answer:
                        now = tuple(sampler.x.shape)
                        sampler.x = checked_latents("latents of the callback", answer["latents"], now)
                bar.update()
                if self._interrupt:
                    break
        images: Any = sampler.x
        if call.output_type != "latent":
            # Cloned: `decode` gives inference tensors, which a caller could neither change nor differentiate.
            pixels = model.vae.decode(images if self.vae is None else images.to(self.vae.dtype)).clone()
            images = (pixels / 2 + 0.5).clamp(0, 1)
            if call.output_type == "pil":
                images = to_images(pixels)
            elif call.output_type == "np":
                images = images.permute(0, 2, 3, 1).numpy()
        self.maybe_free_model_hooks()
        return AtollPipelineOutput(images, sampler.trace) if return_dict else (images, sampler.trace)

    @property
    def _lacks_vae(self) -> bool:
        return self.vae is None and self.card.latents["name"] != "none"

    @property
    def _model(self) -> Model:
        """The parts as they are now: components may be replaced between two calls."""
        card, bank, device = self.card, self.experts, self._execution_device
        costs = Costs.of(card, bank.cards, len(bank), bank.pretrain_card)
        networks = Bank(bank, RouterModel(self.router, card), bank.missing, costs, bank.pretrain)
        encoder = vae = None
        parts = [getattr(self, name) for name in with_tokenizers(text_parts(card.text))]
        if card.text is not None and all(part is not None for part in parts):
            most, pairs = card.text["max_length"], [*zip(parts[::2], parts[1::2], strict=True)]
            length = most if card.shape.pooled_width else prompt_length(self.text_encoder, most)
            encoder = TextEncoder(card.text["name"], pairs, length, device)
        if not self._lacks_vae:
            by = card.latents
            vae = Autoencoder(by["name"], self.vae, device=str(device), **constants_of(by))
        return Model(networks, card, device, encoder=encoder, vae=vae)

    def enable_attention_slicing(self, slice_size: str | int | None = "auto") -> None:
        """Says why there is nothing to slice."""
        if slice_size is not None:
            logger.warning(
                "attention slicing changes nothing: the experts' attention is torch's"
                " scaled_dot_product_attention, which never holds the whole matrix"
            )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        experts: Chosen = "auto",
        residency: Residency | None = None,
        encoders: Collection[str] = (),
        trusted: Collection[str] | None = None,
        torch_dtype: torch.dtype | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a pipeline; files are held against their hashes before anything is built from them.

        Args:
            pretrained_model_name_or_path: folder (`CAMPAIGN/ensemble` or an exported one) or hub name.
            experts: "auto" for all there are, or numbers; from a hub no others are fetched. The share
                of those left out goes to the others.
            residency: how many experts stay on the device; the others lie on disk until they are wanted.
            encoders: names of encoders that you vouch for, where the model names one unknown to Atoll.
            trusted: keys or certificates, one of which must have signed the folder; None takes
                unsigned ones too.
            torch_dtype: type of the networks' numbers; sampling itself is done in float32.
            revision: branch, tag or commit of the hub.
            local_files_only: take the hub's cache, `cache_dir`, as it is.
            kwargs: components in place of the folder's (`scheduler=...`, `text_encoder=None`).

        Raises:
            ConfigError: no such folder, expert or option; encoders that are not those of the training.
            StoreError: a part is missing, damaged, pickle, or of another version.
            PartitionError: parts that do not belong together.
        """
        torch_dtype = kwargs.pop("dtype", None) or torch_dtype
        for option, instead in NOT_TAKEN.items():
            if kwargs.pop(option, None):
                raise ConfigError(f"{option} is not taken", instead)
        name = pretrained_model_name_or_path
        for option, value, kind, fix in (
            ("the model", name, str | os.PathLike, "give a folder or a hub name"),
            ("residency", residency, Residency | None, "give Residency(experts=1) or the like"),
            ("torch_dtype", torch_dtype, torch.dtype | None, "give a type of torch's, such as bfloat16"),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"{option}={repr(value)[:60]}", fix)
        hub = {"revision": revision, "local_files_only": local_files_only}
        with border(name), without_reports():
            folder = open_folder(name, experts, trusted, **hub, cache_dir=cache_dir, token=token)
            root, networks = folder.root, dict(folder.networks)
            limited, router = residency is not None and residency.limited, networks.pop("router")
            kwargs |= by_name(router.card, folder.components, kwargs, encoders)
            pretrain = networks.pop(PRETRAIN_PART).expert() if PRETRAIN_PART in networks else None
            loaded = {
                int(part.removeprefix("experts/")): network.open_lazily()
                if limited or network.card.base
                else network.expert()
                for part, network in networks.items()
            }
            bank = ExpertBank(loaded, folder.k, residency, pretrain)
            routed = router.router()
            routed.network.card = router.card
            # diffusers warns of its own default without accelerate, and would else take pickle too.
            kwargs = {"low_cpu_mem_usage": is_accelerate_available(), "use_safetensors": True, **kwargs}
            pipe: Self = super().from_pretrained(root, experts=bank, router=routed.network, **kwargs)
            pipe.about, pipe._told_of = folder.about, folder.parts
            pipe.picture = (root / PICTURE).read_bytes() if (root / PICTURE).is_file() else None
            bank.warn_of_missing()
            if torch_dtype is not None:
                # After the load, since digests are of the numbers as they were written.
                for part in (pipe.experts, pipe.router, *(getattr(pipe, name) for name in OTHERS)):
                    cast(part if isinstance(part, nn.Module) else None, torch_dtype)
            return pipe

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        variant: str | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the folder that `from_pretrained` reads; experts that lie there unchanged are left alone.

        Evaluation and picture of the folder that was loaded go along only if all its parts do, unchanged.

        Args:
            save_directory: a new or empty folder, or one of an earlier save or export.
            push_to_hub: push as well, to `repo_id` (by default the folder's name).
            kwargs: of `push_to_hub`.

        Raises:
            ConfigError: the folder holds something else, or experts that this pipeline does not have.
        """
        if not safe_serialization or variant is not None:
            what = "pipelines are saved as safetensors without variants"
            raise ConfigError(what, "leave these options out")
        check_flow(self.scheduler)
        # What `torch.compile` has wrapped is written as it was.
        bank: Any = getattr(self.experts, "_orig_mod", self.experts)
        router: Any = getattr(self.router, "_orig_mod", self.router)
        root = output_folder(save_directory)
        bank.check_folder(root / "experts")
        folder = mark_incomplete(root)
        for name in OTHERS:
            # Beside its place first: what is saved may be mapped from the files that lie there.
            target, new, component = root / name, root / f".{name}.new", getattr(self, name)
            shutil.rmtree(new, ignore_errors=True)
            if component is not None:
                getattr(component, "_orig_mod", component).save_pretrained(str(new))
            shutil.rmtree(target, ignore_errors=True)
            if component is not None:
                use_default_permissions(new)
                new.rename(target)
        writer = FolderWriter(folder, len(bank))
        for number, card in bank.cards.items():
            writer.save(bank.network(number), card)
        if bank.pretrain_card is not None:
            writer.save(bank.network(PRETRAIN), bank.pretrain_card)
        writer.save(router, self.card)
        writer.describe(self.config, self.config)
        about, picture = self.about, self.picture
        if writer.parts != self._told_of:  # it was measured, and drew, with other parts
            about, picture = {k: v for k, v in about.items() if k not in ("evaluation", "picture")}, None
        writer.finish(about, picture, kwargs.get("repo_id", "FOLDER"))
        if push_to_hub:
            push_folder(root, kwargs.pop("repo_id", root.name), **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Save and push to OWNER/NAME of the hub; takes `commit_message`, `private`, `token`, `create_pr`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id=repo_id)
            return push_folder(Path(folder), repo_id, **kwargs)
