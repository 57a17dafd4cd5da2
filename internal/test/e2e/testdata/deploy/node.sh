# The first process of a node's namespaces (processes, mounts, control groups): node.sh DIR CGROUP_MOUNT. What is mounted below is shared,
# as on a host with systemd.
set -e
umount -l "$2" # the whole of the host's
mount -t cgroup2 cgroup2 "$2"
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/coppice "$1/data" "$1/pods"
mount --bind "$1/data" "$1/data"
mount --make-rshared /
mount -t tmpfs tmpfs "$1/pods"
mount --make-private "$1/pods"
echo "the node is up"
exec sleep infinity
