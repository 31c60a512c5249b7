"""Stand-in, see the package: requests, batches and how long they take."""


class BaseEntity:
    _id = -1

    @classmethod
    def generate_id(cls):
        cls._id += 1
        return cls._id

    @property
    def id(self):
        return self._id


class Request(BaseEntity):
    def __init__(self, arrived_at, num_prefill_tokens, num_decode_tokens, num_processed_tokens=0):
        self._id = Request.generate_id()
        self._num_prefill_tokens, self._num_decode_tokens = num_prefill_tokens, num_decode_tokens
        self._num_decode_tokens = num_decode_tokens
        self._num_processed_tokens = num_processed_tokens
        self._is_prefill_complete = False
        self._spec_decode_enabled = False

    num_prefill_tokens = property(lambda self: self._num_prefill_tokens)
    num_processed_tokens = property(lambda self: self._num_processed_tokens)
    spec_decode_enabled = property(lambda self: self._spec_decode_enabled)

    def restart(self):
        """What was processed becomes a prompt, to be computed anew."""
        total = self._num_prefill_tokens + self._num_decode_tokens
        self._num_prefill_tokens = self._num_processed_tokens
        self._num_decode_tokens = total - self._num_prefill_tokens
        self._num_processed_tokens, self._is_prefill_complete = 0, False

    def on_batch_end(self, time, num_tokens_processed, cluster_type):
        if self._is_prefill_complete:
            if cluster_type.name != "PREFILL":
                self._num_processed_tokens += num_tokens_processed
            return
        self._num_processed_tokens += num_tokens_processed
        if self._num_processed_tokens == self._num_prefill_tokens:
            self._is_prefill_complete = True
            # the step that ends the prefill gives the first output token, where one cluster does both
            self._num_processed_tokens += cluster_type.name == "MONOLITHIC"


class Batch(BaseEntity):
    def __init__(self, replica_id, requests, num_tokens, is_moe=None):
        if is_moe is None:
            raise ValueError("is_moe is not set")
        self._id = Batch.generate_id()
        self.replica_id, self.requests, self.num_tokens = replica_id, requests, num_tokens


IN_LAYERS = (
    "attention_rope_execution_time",
    "attention_kv_cache_save_execution_time",
    "attention_decode_execution_time",
    "attention_prefill_execution_time",
    "attention_layer_pre_proj_execution_time",
    "attention_layer_post_proj_execution_time",
    "attn_norm_time",
    "mlp_norm_time",
    "add_time",
    "mlp_layer_up_proj_execution_time",
    "mlp_layer_down_proj_execution_time",
    "mlp_layer_act_execution_time",
)


class ExecutionTime(BaseEntity):
    """Terms in ms, of one layer or of the step; dense."""

    def __init__(
        self,
        num_layers_per_pipeline_stage,
        attention_rope_execution_time,
        attention_kv_cache_save_execution_time,
        attention_decode_execution_time,
        attention_prefill_execution_time,
        attention_layer_pre_proj_execution_time,
        attention_layer_post_proj_execution_time,
        attn_norm_time,
        mlp_norm_time,
        add_time,
        tensor_parallel_communication_time,
        pipeline_parallel_communication_time,
        expert_parallel_communication_time,
        moe_gating_time,
        moe_shuffling_time,
        schedule_time,
        sampler_e2e_time,
        prepare_inputs_e2e_time,
        process_model_outputs_time,
        ray_comm_time,
        is_moe,
        mlp_layer_up_proj_execution_time=0.0,
        mlp_layer_down_proj_execution_time=0.0,
        mlp_layer_act_execution_time=0.0,
    ):
        given = dict(locals())
        self._id = ExecutionTime.generate_id()
        self._is_moe = is_moe
        self._num_layers_per_pipeline_stage = num_layers_per_pipeline_stage
        self._terms = {name: given[name] for name in IN_LAYERS}
        self._tensor_parallel_communication_time = tensor_parallel_communication_time
        self._sampler_e2e_time = sampler_e2e_time

    @property
    def diagnostic_total_time_ms(self):
        """As the ledger of a stage's batch reads it."""
        return self.diagnostic_total_time * 1e3

    sampler_e2e_time = property(lambda self: self._sampler_e2e_time)

    @property
    def attention_decode_execution_time(self):
        return self._terms["attention_decode_execution_time"] * self._num_layers_per_pipeline_stage

    @property
    def layers_ms(self):
        """All layers; an all-reduce after attention and one after the MLP."""
        one = sum(self._terms.values()) + 2.0 * self._tensor_parallel_communication_time
        return one * self._num_layers_per_pipeline_stage
