"""Stand-in, see the package: the registry of predictors."""

from .types import ExecutionTimePredictorType


class BaseRegistry:
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._registry = {}

    @classmethod
    def register(cls, key, implementation_class):
        cls._registry.setdefault(key, implementation_class)

    @classmethod
    def unregister(cls, key):
        cls.get_class(key)
        del cls._registry[key]

    @classmethod
    def get_class(cls, key):
        if key not in cls._registry:
            raise ValueError(f"{key} is not registered")
        return cls._registry[key]

    @classmethod
    def get(cls, key, *args, **kwargs):
        return cls.get_class(key)(*args, **kwargs)


class ExecutionTimePredictorRegistry(BaseRegistry):
    @classmethod
    def get_key_from_str(cls, key_str):
        return ExecutionTimePredictorType.from_str(key_str)
