"""Every private name of torch, transformers and datasets that the library touches, each with its reason.

A private name may change in any release. So each function here says which name it uses and why no public name
would do. ``PRIVATE`` says where attributes are; what is imported by name need not be in it. A test looks for
all of them on the lowest and the newest versions (``make test-floor``, ``make test-latest``).
"""

_FSDP = "torch.distributed.fsdp"
# Module and object, to the attributes of it, or of its instances, that are used here.
PRIVATE = {
    f"{_FSDP}:FSDPModule": "_get_fsdp_state reset_iter_state",
    f"{_FSDP}._fully_shard._fsdp_state:FSDPState": "_fsdp_param_groups _is_root _mp_policy _training_state",
    f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup": (
        "_init_mp_dtypes device fsdp_params gradient_divide_factor is_sharded "
        "is_sharded_post_forward mesh_info modules offload_policy post_forward_mesh_info"
    ),
    f"{_FSDP}._fully_shard._fsdp_param:FSDPParam": (
        "_init_extensions _module_info _sharded_param_data _sharded_post_forward_param _unsharded_param "
        "all_gather_outputs sharded_param unsharded_accumulated_grad"
    ),
    "torch.distributed.tensor:DTensor": "_local_tensor _spec",
    "torch.distributed.tensor._redistribute:": "_gen_transform_infos",
    "torch.distributed.tensor.debug:": "_clear_sharding_prop_cache",
    "torch.distributed.device_mesh:DeviceMesh": "_unflatten",
    "torch.distributed.distributed_c10d:ProcessGroupGloo": "_Options",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options": "_devices _threads _timeout",
    "torch:_C": "_TorchDispatchModeKey _get_dispatch_mode",
    "torch:Tensor": "_backward_hooks _make_wrapper_subclass _post_accumulate_grad_hooks",
    "torch._ops:OpOverload": "_schema",
    "torch._dynamo:OptimizedModule": "_orig_mod",
    "torch.nn:Module": (
        "_apply _backward_hooks _backward_pre_hooks _compiled_call_impl _forward_hooks _forward_pre_hooks "
        "_parameters"
    ),
    "torch.nn.modules:module": (
        "_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks"
    ),
    "torch.amp:GradScaler": "_growth_tracker _init_scale _per_optimizer_states _scale",
    "torch.utils.data:DataLoader": "_iterator",
    "transformers:PreTrainedConfig": "_attn_implementation _experts_implementation",
    "transformers:PreTrainedModel": (
        "_expand_parallel_plan _get_dtype_plan _gradient_checkpointing_func "
        "_keys_to_ignore_on_load_missing _keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save "
        "_mesh_manager _tied_weights_keys"
    ),
    "transformers.core_model_loading:": "_weight_conversions",
    "transformers.initialization:": "_is_hf_initialized",
    "transformers.integrations.moe:": "_apply_gate",
    "datasets:Dataset": "_fingerprint",
    "datasets:IterableDataset": "_distributed",
}
