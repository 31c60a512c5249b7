"""Stand-in, see the package: the entry point."""

from .config import SimulationConfig
from .simulator import Simulator, poisson_requests


def main():
    config = SimulationConfig.create_from_cli_args()
    simulator = Simulator(config, poisson_requests(100, 5.0, config.seed))
    print(f"Simulation ended at: {simulator.run()}s after {simulator.batches} batches")


if __name__ == "__main__":
    main()
