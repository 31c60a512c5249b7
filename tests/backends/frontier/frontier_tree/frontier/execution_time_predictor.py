"""Stand-in, see the package: the registry of predictors."""


class ExecutionTimePredictorRegistry:
    _registry = {}  # noqa: RUF012

    @classmethod
    def register(cls, key, implementation_class):
        cls._registry.setdefault(key, implementation_class)

    @classmethod
    def unregister(cls, key):
        del cls._registry[key]

    @classmethod
    def get_class(cls, key):
        return cls._registry[key]

    @classmethod
    def get(
        cls,
        predictor_type,
        predictor_config,
        replica_config,
        replica_scheduler_config,
        metrics_config,
        cluster_config=None,
        model_manager=None,
        cluster_type=None,
        training_file_paths=None,
        actual_replica_ids=None,
        cc_backend=None,
    ):
        others = dict(locals())
        del others["cls"], others["predictor_type"]
        try:
            return cls._registry[predictor_type](**others)
        except Exception as error:
            raise ValueError(f"Failed to create predictor of type '{predictor_type}': {error}")  # noqa: B904
