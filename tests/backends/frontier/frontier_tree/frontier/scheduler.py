"""Stand-in, see the package: how a stage's scheduler calls its predictor, and a loop over one cluster."""

from .types import ClusterType


def predict_and_create_stage(predictor, batch, stage_id, cluster_type):
    """What BatchStage is made with: seconds of the step and of the model."""
    num_layers = predictor._num_layers_per_pipeline_stage
    if cluster_type in (ClusterType.DECODE_ATTN, ClusterType.DECODE_FFN):
        num_layers = 1
    found = predictor.predict_stage_execution_time(
        batch, stage_id, cluster_type=cluster_type, num_layers=num_layers, layer_id=0
    )
    return found.total_time, found.model_time
