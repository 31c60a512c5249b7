#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=$cpus
#SBATCH --mem=${memory_gib}G
#SBATCH --gres=gpu:$gpus
#SBATCH --time=$time_limit
#SBATCH --output=$name-%j.log
$directives
# Written by kernels-bench job slurm. Submit it again to go on with a run that was cut off.
set -euo pipefail

output=$output
mkdir -p -- "$$output"

kernels_bench() {
    $launcher "$$@"
}

$script
