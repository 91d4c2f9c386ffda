# In a mount namespace of its own: a machine of two NUMA nodes, with the cores NODE0 and NODE1, and a GPU on each, the
# first one of the bus on node 1. SCRATCH is an empty folder. Then the program of the arguments.
set -e
mkdir "$SCRATCH"/{dev,node,pci}
for node in 0 1; do
    mkdir "$SCRATCH/node/node$node"
    name=NODE$node
    echo "${!name}" >"$SCRATCH/node/node$node/cpulist"
done
for gpu in 0000:3b:00.0=1 0000:af:00.0=0; do
    mkdir -p "$SCRATCH/pci/devices/${gpu%=*}"
    echo "${gpu#*=}" >"$SCRATCH/pci/devices/${gpu%=*}/numa_node"
done
for file in null zero random urandom; do
    touch "$SCRATCH/dev/$file"
    mount --bind "/dev/$file" "$SCRATCH/dev/$file"
done
touch "$SCRATCH/dev/nvidia0"
mount --bind "$SCRATCH/node" /sys/devices/system/node
mount --bind "$SCRATCH/pci" /sys/bus/pci
mount --rbind "$SCRATCH/dev" /dev
exec "$@"
