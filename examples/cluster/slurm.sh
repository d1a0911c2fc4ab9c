#!/bin/bash
#SBATCH --job-name=latentcache
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00

# sbatch examples/cluster/slurm.sh examples/cluster/cluster.yaml
set -euo pipefail
config=$1

export RAY_USAGE_STATS_ENABLED=0
# One token for all nodes of this job: whoever reaches Ray's ports without it runs no code here.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
resources=(--num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "$SLURM_GPUS_PER_NODE" --block)

srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port="$port" --include-dashboard=false "${resources[@]}" &
sleep 20
# One task a node, which is to be said: srun takes the number of tasks of the whole job, SLURM_NTASKS, otherwise, and would
# start Ray twice on one of these nodes, with all its GPUs each time.
workers=$((SLURM_NNODES - 1))
srun --nodes="$workers" --ntasks="$workers" --exclude="$head" ray start --address="$head:$port" "${resources[@]}" &

# On the head's node, next to Ray. The step takes no resources of its own. The cluster has all its nodes: an encoder for each GPU.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  latentcache precache "$config" --ray "$head:$port" --ray.max_encoders auto
