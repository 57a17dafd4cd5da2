# Runs a program as a container runtime runs the runner of deploy/helm: pod.sh DIR CGROUP_MOUNT NAME IMAGES PROGRAM…, on a node made by
# node.sh. Its processes are the node's (hostPID), and its network; its root is its own; mounts in the data directory and in /run/netns
# go both ways (Bidirectional), and everything in its control group is killed with it.
set -e
dir=$1 cgroups=$2 pod=$1/pods/$3 images=$4
mkdir "$cgroups/$3"
echo $BASHPID >"$cgroups/$3/cgroup.procs"
shift 4
# As runc does it: the mounts keep their peers, and the new root is below a private one.
exec unshare --mount --propagation unchanged bash -ec '
	dir=$1 cgroups=$2 pod=$3 images=$4 root=$3/root
	shift 4
	mkdir -p "$pod/upper" "$pod/work" "$root"
	mount -t overlay overlay -o "lowerdir=/,upperdir=$pod/upper,workdir=$pod/work" "$root"
	for d in /proc /sys /dev /tmp "$images"; do
		mkdir -p "$root$d"
		mount --rbind "$d" "$root$d"
		mount --make-rprivate "$root$d"
	done
	mount -t tmpfs tmpfs "$root/run"
	mkdir -p "$root/run/netns" "$root/run/coppice" "$root$dir/data" "$root/mnt/old"
	mount --rbind "$dir/data" "$root$dir/data"
	mount --rbind /run/netns "$root/run/netns"
	mount --rbind /run/coppice "$root/run/coppice"
	mount --make-rprivate "$root/run/coppice"
	cd "$root"
	pivot_root . mnt/old
	cd /
	mount --make-rslave /mnt/old
	umount -l /mnt/old
	exec "$@"
' pod "$dir" "$cgroups" "$pod" "$images" "$@"
