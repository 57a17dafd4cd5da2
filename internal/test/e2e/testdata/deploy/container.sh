# Runs a program as an engine runs the runner of docker-compose.yml: container.sh DIR IMAGES CAPABILITIES PROGRAM…, as the first process of namespaces of
# its own. What is not there of an engine: its seccomp and AppArmor profiles, and a network namespace.
set -e
dir=$1 images=$2 capabilities=$3 root=$1/root
shift 3
mkdir -p "$root" "$dir/upper"
mount -t tmpfs tmpfs "$dir/upper"
mkdir "$dir/upper/upper" "$dir/upper/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/upper/upper,workdir=$dir/upper/work" "$root"
mount -t proc proc "$root/proc" # with /proc/sys to be written: systempaths=unconfined
mount -t sysfs sysfs "$root/sys"
mkdir -p "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -o remount,bind,ro "$root/sys/fs/cgroup"
mount -o remount,bind,ro "$root/sys"
mount -t tmpfs tmpfs "$root/dev"
for d in null zero full random urandom tty net/tun; do
	mkdir -p "$(dirname "$root/dev/$d")"
	touch "$root/dev/$d"
	mount --bind "/dev/$d" "$root/dev/$d"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666
mount -t tmpfs tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs tmpfs "$root/run"
for d in "$dir/data" "$images"; do
	mkdir -p "$root$d"
	mount --bind "$d" "$root$d"
done
mkdir -p "$root/mnt/old"
cd "$root"
pivot_root . mnt/old
cd /
umount -l /mnt/old
# Without /usr/sbin, where mkfs.xfs is: the image has none.
exec env -i PATH=/usr/local/bin:/usr/bin:/bin setpriv --bounding-set "$capabilities" --inh-caps -all --no-new-privs "$@"
