//go:build linux

package reseal

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/identity"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

// reseedKernel gives fresh bytes to the kernel's generator and makes it use them. Once the generator is ready, adding
// entropy alone changes nothing (Linux 5.18 and later). The second call makes the new key, and so discards the per-CPU
// keys, the batches of get_random_u64 and the state behind the vDSO.
func reseedKernel(path string, entropy []byte) error {
	fd, err := smallfile.Open(path, unix.O_WRONLY, 0)
	if err != nil {
		return smallfile.PathError("open", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	pool := struct {
		bits, size int32
		buf        [guestapi.EntropySize]byte
	}{bits: guestapi.EntropySize * 8, size: guestapi.EntropySize}
	copy(pool.buf[:], entropy)
	if err := ioctl(uintptr(fd), unix.RNDADDENTROPY, unsafe.Pointer(&pool)); err != nil {
		return wrap(err, "RNDADDENTROPY")
	}
	if err := ioctl(uintptr(fd), unix.RNDRESEEDCRNG, nil); err != nil {
		return wrap(err, "RNDRESEEDCRNG")
	}
	return nil
}

func ioctl(fd, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// drawKeys are made before any clone, because formatting executes much code.
var drawKeys = func() (keys [guestapi.EvidenceDraws]string) {
	for i := range keys {
		keys[i] = fmt.Sprintf(guestapi.EvidenceDrawKey, i)
	}
	return keys
}()

func stepEntropy(_ context.Context, r *Run) (Evidence, error) {
	if err := r.sys.reseed(r.sys.random, r.req.Entropy); err != nil {
		return nil, err
	}
	ev := make(Evidence, guestapi.EvidenceDraws+1)
	ev["ioctls"] = "RNDADDENTROPY, RNDRESEEDCRNG"
	for i := range guestapi.EvidenceDraws {
		var draw [32]byte
		if _, err := unix.Getrandom(draw[:], 0); err != nil {
			return nil, wrap(err, "getrandom")
		}
		sum := sha256.Sum256(draw[:])
		ev[drawKeys[i]] = hex.EncodeToString(sum[:16])
	}
	return ev, nil
}

// stepClock sets the wall clock to the host's, plus the time since the request arrived. CLOCK_MONOTONIC cannot be set:
// it continues from the capture.
func stepClock(_ context.Context, r *Run) (Evidence, error) {
	before := time.Now()
	now := time.Unix(0, r.req.HostTimeNS).Add(before.Sub(r.received))
	ts := unix.NsecToTimespec(now.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return nil, wrap(err, "clock_settime")
	}
	var got unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &got); err != nil {
		return nil, wrap(err, "clock_gettime")
	}
	return Evidence{
		"skew_before_ms":        strconv.FormatInt(now.Sub(before.Round(0)).Milliseconds(), 10),
		guestapi.EvidenceTimeNS: strconv.FormatInt(got.Nano(), 10),
	}, nil
}

// stepBootID replaces the visible boot id; the kernel's own changes only with a boot. The covering file was mounted
// when the guest booted, and is written in place. Root in the workload may have removed that mount.
func stepBootID(context.Context, *Run) (Evidence, error) {
	id := newUUID()
	if err := smallfile.Write(identity.BootIDFile, []byte(id+"\n"), 0o444); err != nil {
		return nil, err
	}
	got, err := readBack(identity.BootIDPath)
	if err != nil {
		return nil, err
	}
	if got != id {
		if err := identity.CoverBootID(); err != nil {
			return nil, err
		}
		if got, err = readBack(identity.BootIDPath); err != nil {
			return nil, err
		}
	}
	if got != id {
		return nil, fmt.Errorf("%s reads %q after the change", identity.BootIDPath, got)
	}
	return Evidence{guestapi.EvidenceValue: got}, nil
}

// newUUID returns a random UUID, version 4.
func newUUID() string {
	var u [16]byte
	_, _ = rand.Read(u[:])
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// onOtherThread runs fn outside the workload's namespaces, in those of the agent.
func onOtherThread(fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	return <-done
}

// dbusID is a second place for the machine id in some images; in most images it is a link, or missing.
const dbusID = "/var/lib/dbus/machine-id"

// stepMachineID writes the id to the places where programs read it.
func stepMachineID(_ context.Context, r *Run) (Evidence, error) {
	id := r.req.Identity.MachineID
	const main = "/etc/machine-id"
	if err := r.writeIdentity(main, id+"\n", 0o444); err != nil {
		return nil, err
	}
	if r.found != nil && r.found.dbus || r.found == nil && smallfile.IsRegular(dbusID) {
		if err := smallfile.Replace(dbusID, []byte(id+"\n"), 0o444); err != nil {
			return nil, err
		}
	}
	got, err := readBack(main)
	return Evidence{guestapi.EvidenceValue: got}, err
}

// stepHostname sets the host name. The workload shares the agent's UTS namespace.
func stepHostname(_ context.Context, r *Run) (Evidence, error) {
	name := r.req.Identity.Hostname
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, wrap(err, "uname")
	}
	old := unix.ByteSliceToString(u.Nodename[:])
	if err := unix.Sethostname([]byte(name)); err != nil {
		return nil, wrap(err, "sethostname")
	}
	if err := r.writeIdentity("/etc/hostname", name+"\n", 0o644); err != nil {
		return nil, err
	}
	if err := renameInHosts("/etc/hosts", old, name); err != nil {
		return nil, err
	}
	if err := unix.Uname(&u); err != nil {
		return nil, wrap(err, "uname")
	}
	return Evidence{guestapi.EvidenceValue: unix.ByteSliceToString(u.Nodename[:]), "before": old}, nil
}

// maxHosts bounds the size of an /etc/hosts in which the machine is renamed. Some users block thousands of names there.
const maxHosts = 4 << 20

// renameInHosts renames the machine in /etc/hosts. A larger file stays as it is: a part of it must not replace it.
func renameInHosts(path, old, name string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err == nil && st.Size > maxHosts {
		return nil
	}
	var hosts []byte
	fd, err := smallfile.Open(path, unix.O_RDONLY, 0)
	switch {
	case err == nil:
		hosts, err = smallfile.ReadToEnd(fd, maxHosts+1)
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return smallfile.PathError("read", path, err)
		}
	case !errors.Is(err, unix.ENOENT):
		return smallfile.PathError("open", path, err)
	}
	return identity.WriteFile(path, []byte(identity.EditHosts(string(hosts), old, name)), 0o644)
}

const tfoKeyPath = "/proc/sys/net/ipv4/tcp_fastopen_key"

func stepTFOKey(context.Context, *Run) (Evidence, error) {
	var k [16]byte
	_, _ = rand.Read(k[:])
	h := hex.EncodeToString(k[:])
	key := h[:8] + "-" + h[8:16] + "-" + h[16:24] + "-" + h[24:]
	if err := smallfile.Write(tfoKeyPath, []byte(key), 0o600); err != nil {
		return nil, err
	}
	got, err := readBack(tfoKeyPath)
	if err != nil {
		return nil, err
	}
	if got != key {
		return nil, errors.New("the kernel has not taken the key")
	}
	sum := sha256.Sum256([]byte(got))
	return Evidence{guestapi.EvidenceKeyHash: short(sum[:])}, nil
}

// ext4Resize is EXT4_IOC_RESIZE_FS: grow a mounted ext4 to a number of blocks.
const ext4Resize = 0x40086610

// stepDisk grows the writable disk's file system to the size of its device.
func stepDisk(_ context.Context, r *Run) (Evidence, error) {
	if !r.req.GrowDisk {
		return nil, skipError("not asked for")
	}
	var ev Evidence
	err := onOtherThread(func() error {
		var err error
		ev, err = growDisk(r.sys.diskMount, r.req.DiskBytes)
		return err
	})
	return ev, err
}

// growWait is the time that the driver may need to see a new size, which the VMM reports with an interrupt.
const growWait = 5 * time.Second

// growDisk grows the mounted file system to the size of its device, once the device has at least the expected size.
func growDisk(mount string, expected int64) (Evidence, error) {
	d, err := os.Open(mount)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	var st unix.Stat_t
	var sfs unix.Statfs_t
	if err := errors.Join(unix.Fstat(int(d.Fd()), &st), unix.Fstatfs(int(d.Fd()), &sfs)); err != nil {
		return nil, err
	}
	device, err := deviceBytes(st.Dev)
	for deadline := time.Now().Add(growWait); err == nil && device < expected; device, err = deviceBytes(st.Dev) {
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the device has %d bytes, not %d", device, expected)
		}
		_, _ = unix.Poll(nil, 2) // the change is not announced
	}
	if err != nil {
		return nil, err
	}
	before := int64(sfs.Blocks) * sfs.Bsize
	blocks := uint64(device / sfs.Bsize)
	// A request for the present size succeeds at once; the kernel refuses a smaller one.
	if err := ioctl(d.Fd(), ext4Resize, unsafe.Pointer(&blocks)); err != nil {
		return nil, wrap(err, "EXT4_IOC_RESIZE_FS")
	}
	if err := unix.Fstatfs(int(d.Fd()), &sfs); err != nil {
		return nil, err
	}
	return Evidence{
		guestapi.EvidenceDevice: strconv.FormatInt(device, 10), "before_bytes": strconv.FormatInt(before, 10),
		"bytes": strconv.FormatInt(int64(sfs.Blocks)*sfs.Bsize, 10),
	}, nil
}

// deviceBytes returns the size of a block device.
func deviceBytes(dev uint64) (int64, error) {
	s, err := readBack(fmt.Sprintf("/sys/dev/block/%d:%d/size", unix.Major(dev), unix.Minor(dev)))
	if err != nil {
		return 0, err
	}
	sectors, err := strconv.ParseInt(s, 10, 64)
	return sectors * 512, err
}
