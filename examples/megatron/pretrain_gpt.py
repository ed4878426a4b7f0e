"""Pretrains a GPT on text with Megatron's own training loop (0.17 to 0.19), with or without hot switching.

    torchrun --nproc-per-node 4 examples/megatron/pretrain_gpt.py <Megatron's arguments> \
        --hotspa-pool "tp1:4096 tp2:16384 tp4:32768"

One line makes the difference to a script without hot switching: ``import hotspa_plugin.megatron_adaptor``. Where there
is no CUDA the script redirects it to the CPU, for trying out.
"""

import functools
import inspect

import torch

if not torch.cuda.is_available():
    from hotspa_plugin.integrations.megatron.megatron_training import cpu

    cpu.enable()

import hotspa_plugin.megatron_adaptor  # noqa: F401  isort: skip

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

from hotspa_plugin.data.indexed_dataset import IndexedDatasetSource
from hotspa_plugin.integrations.megatron.megatron_training.documents import DocumentDataset

FIELDS = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}


def add_arguments(parser):
    group = parser.add_argument_group(title="example")
    group.add_argument("--document-samples", action="store_true", help="one document a sample, padded to --seq-length")
    return parser


def get_batch(data_iterator):
    """The next micro-batch, read by the first tensor-parallel rank and sent to its peers."""
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return dict.fromkeys(FIELDS)
    args = get_args()
    group = mpu.get_tensor_model_parallel_group()
    source = mpu.get_tensor_model_parallel_src_rank()
    item = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    shape = (args.micro_batch_size, args.seq_length)
    batch = {}
    for name, dtype in FIELDS.items():
        if item is not None:
            batch[name] = item[name].to(dtype).cuda(non_blocking=True).contiguous()
        else:
            batch[name] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        torch.distributed.broadcast(batch[name], source, group=group)
    return batch


def loss_func(loss_mask, losses):
    """Sum over target tokens, their number, and both for the report: what --calculate-per-token-loss asks for."""
    args = get_args()
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message="found NaN in the loss", tolerance=0.0, fatal=True
        )
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator, model):
    batch = get_batch(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(loss_func, batch["loss_mask"])


def reads_data():
    return mpu.get_tensor_model_parallel_rank() == 0 and (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage())


def datasets_provider(num_samples, vp_stage=None):
    """Training, validation and test sets."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if args.document_samples:
        source = IndexedDatasetSource(blend[0][0], vocab_size=args.padded_vocab_size)
        return [
            DocumentDataset(source, num_samples=n, seed=args.seed, padded_tokens=args.seq_length, split=split)
            if n
            else None
            for n, split in zip(num_samples, (Split.train, Split.valid, Split.test))
        ]
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building data sets")
    return BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()


datasets_provider.is_distributed = True


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """This rank's part of the model, for releases that do not build it from a configuration themselves."""
    args = get_args()
    local = args.transformer_impl == "local"
    spec = get_gpt_layer_local_spec if local else get_gpt_layer_with_transformer_engine_spec
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=spec(
            qk_layernorm=args.qk_layernorm, **({"normalization": args.normalization} if local else {})
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def main():
    run = functools.partial(
        pretrain,
        train_valid_test_dataset_provider=datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )
    parameters = inspect.signature(pretrain).parameters
    if "cfg_container" not in parameters:  # 0.17
        run(model_provider=model_provider, extra_args_provider=add_arguments)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_arguments)
    if parameters["model_provider"].default is inspect.Parameter.empty:  # 0.18
        run(cfg_container=pretrain_cfg_container_from_args(args), model_provider=model_provider)
        return
    from megatron.training.argument_utils import gpt_config_from_args

    run(cfg_container=pretrain_cfg_container_from_args(args, gpt_config_from_args(args)))


if __name__ == "__main__":
    main()
