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
        self._arrived_at = arrived_at
        self._num_prefill_tokens = num_prefill_tokens
        self._num_decode_tokens = num_decode_tokens
        self._num_processed_tokens = num_processed_tokens
        self._is_prefill_complete = False
        self._prefill_completed_at = 0
        self._completed_at = 0
        self._completed = False
        self._num_restarts = 0

    arrived_at = property(lambda self: self._arrived_at)
    num_prefill_tokens = property(lambda self: self._num_prefill_tokens)
    num_decode_tokens = property(lambda self: self._num_decode_tokens)
    num_processed_tokens = property(lambda self: self._num_processed_tokens)
    total_tokens = property(lambda self: self._num_prefill_tokens + self._num_decode_tokens)
    is_prefill_complete = property(lambda self: self._is_prefill_complete)
    prefill_completed_at = property(lambda self: self._prefill_completed_at)
    completed = property(lambda self: self._completed)
    completed_at = property(lambda self: self._completed_at)
    num_restarts = property(lambda self: self._num_restarts)

    def on_batch_end(self, time, num_tokens_processed):
        self._num_processed_tokens += num_tokens_processed
        assert self._num_processed_tokens <= self.total_tokens
        if self._num_processed_tokens == self._num_prefill_tokens:
            # the prefill's last step gives the first output token
            self._is_prefill_complete = True
            self._num_processed_tokens += 1
            self._prefill_completed_at = self._prefill_completed_at or time
        if self._num_processed_tokens == self.total_tokens:
            self._completed_at = time
            self._completed = True

    def restart(self):
        """Give up the KV cache: what was processed, output included, is prefilled again."""
        total = self.total_tokens
        self._num_prefill_tokens = self._num_processed_tokens
        self._num_decode_tokens = total - self._num_prefill_tokens
        self._num_processed_tokens = 0
        self._is_prefill_complete = False
        self._num_restarts += 1


class Batch(BaseEntity):
    def __init__(self, replica_id, requests, num_tokens):
        self._id = Batch.generate_id()
        self._replica_id = replica_id
        self._requests = requests
        self._num_tokens = num_tokens
        self._total_num_tokens = sum(num_tokens)

    requests = property(lambda self: self._requests)
    num_tokens = property(lambda self: self._num_tokens)
    total_num_tokens = property(lambda self: self._total_num_tokens)
    size = property(lambda self: len(self._requests))

    def on_batch_end(self, time):
        for request, num_tokens in zip(self._requests, self._num_tokens, strict=True):
            request.on_batch_end(time, num_tokens)


class ExecutionTime(BaseEntity):
    """Terms in ms: of a layer, but for pipeline communication and the five of the CPU, which are a step's."""

    def __init__(
        self,
        num_layers_per_pipeline_stage,
        attention_rope_execution_time,
        attention_kv_cache_save_execution_time,
        attention_decode_execution_time,
        attention_prefill_execution_time,
        attention_layer_pre_proj_execution_time,
        attention_layer_post_proj_execution_time,
        mlp_layer_up_proj_execution_time,
        mlp_layer_down_proj_execution_time,
        mlp_layer_act_execution_time,
        attn_norm_time,
        mlp_norm_time,
        add_time,
        tensor_parallel_communication_time,
        pipeline_parallel_communication_time,
        schedule_time,
        sampler_e2e_time,
        prepare_inputs_e2e_time,
        process_model_outputs_time,
        ray_comm_time,
    ):
        given = dict(locals())
        self._id = ExecutionTime.generate_id()
        for name in TERMS:
            setattr(self, f"_{name}", given[name])

    num_layers = property(lambda self: self._num_layers_per_pipeline_stage)
    attention_pre_proj_time = property(lambda self: self._attention_layer_pre_proj_execution_time)
    attention_post_proj_time = property(lambda self: self._attention_layer_post_proj_execution_time)
    attention_all_reduce_time = property(lambda self: self._tensor_parallel_communication_time)
    mlp_all_reduce_time = property(lambda self: self._tensor_parallel_communication_time)
    attention_rope_execution_time = property(lambda self: self._attention_rope_execution_time)
    attention_kv_cache_save_execution_time = property(
        lambda self: self._attention_kv_cache_save_execution_time
    )
    attention_decode_execution_time = property(lambda self: self._attention_decode_execution_time)
    attention_prefill_execution_time = property(lambda self: self._attention_prefill_execution_time)
    mlp_layer_up_proj_execution_time = property(lambda self: self._mlp_layer_up_proj_execution_time)
    mlp_layer_down_proj_execution_time = property(lambda self: self._mlp_layer_down_proj_execution_time)
    mlp_layer_act_execution_time = property(lambda self: self._mlp_layer_act_execution_time)
    attn_norm_time = property(lambda self: self._attn_norm_time)
    mlp_norm_time = property(lambda self: self._mlp_norm_time)
    add_time = property(lambda self: self._add_time)
    pipeline_parallel_communication_time = property(lambda self: self._pipeline_parallel_communication_time)
    schedule_time = property(lambda self: self._schedule_time)
    sampler_e2e_time = property(lambda self: self._sampler_e2e_time)
    prepare_inputs_e2e_time = property(lambda self: self._prepare_inputs_e2e_time)
    process_model_outputs_time = property(lambda self: self._process_model_outputs_time)
    ray_comm_time = property(lambda self: self._ray_comm_time)

    @property
    def model_time(self):
        """Seconds."""
        reduce = self._tensor_parallel_communication_time
        attention = (
            self._attention_layer_pre_proj_execution_time
            + self._attention_layer_post_proj_execution_time
            + self._attention_rope_execution_time
            + self._attention_kv_cache_save_execution_time
            + self._attention_decode_execution_time
            + self._attention_prefill_execution_time
            + self._attn_norm_time
            + reduce
        )
        mlp = (
            self._mlp_layer_up_proj_execution_time
            + self._mlp_layer_down_proj_execution_time
            + self._mlp_layer_act_execution_time
            + self._mlp_norm_time
            + reduce
        )
        layers = self._num_layers_per_pipeline_stage * (attention + mlp + self._add_time)
        return (layers + self._pipeline_parallel_communication_time) * 1e-3

    @property
    def model_time_ms(self):
        return self.model_time * 1e3

    @property
    def total_time(self):
        """Seconds."""
        overhead = (
            self._schedule_time
            + self._sampler_e2e_time
            + self._prepare_inputs_e2e_time
            + self._process_model_outputs_time
            + self._ray_comm_time
        )
        return self.model_time + overhead * 1e-3


TERMS = ExecutionTime.__init__.__code__.co_varnames[1 : ExecutionTime.__init__.__code__.co_argcount]
