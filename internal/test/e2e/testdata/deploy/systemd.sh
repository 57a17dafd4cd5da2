# Starts systemd as the first process of namespaces of its own, on a root that is this host's with a layer over it: systemd.sh DIR IMAGES SOCKET. What is in
# DIR/layer is on that root. Only the units that are asked for run.
set -e
root=$1/root
mkdir -p "$root" "$1/upper"
mount -t tmpfs tmpfs "$1/upper"
mkdir "$1/upper/upper" "$1/upper/work"
cp -a "$1/layer/." "$1/upper/upper/"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper/upper,workdir=$1/upper/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/sys/fs/cgroup" "$root/mnt/old" "$root/var/lib/coppice" "$root/srv/images" "$root/run/database"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount --bind "$1/data" "$root/var/lib/coppice"
mount --bind "$2" "$root/srv/images"
if [ -n "$3" ]; then # the controller is not its owner; its directory keeps others away from it
	chmod 0777 "$3"
	touch "$root/run/database/${3##*/}"
	mount --bind "$3" "$root/run/database/${3##*/}"
fi
cd "$root"
rm -rf usr/lib/systemd/system/*.target.wants etc/systemd/system/*.wants
sed -i '/^Wants=/d' usr/lib/systemd/system/sysinit.target usr/lib/systemd/system/basic.target usr/lib/systemd/system/network-online.target
pivot_root . mnt/old
umount -l /mnt/old
exec env -i container=coppice PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=coppice-test.target --show-status=no
