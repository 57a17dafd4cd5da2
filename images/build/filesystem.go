package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// Identifiers inside the file systems. They are fixed, so that equal content gives equal bytes; nothing in a guest may
// rely on them being unique.
const (
	rootFSUUID      = "c0991ce0-0000-4000-8000-000000000001"
	overlayUUID     = "c0991ce0-0000-4000-8000-000000000002"
	overlayHashSeed = "c0991ce0-0000-4000-8000-000000000003"
)

// The overlay disk: its first size, and the size up to which a guest can grow it while it is mounted.
const (
	overlayBytes    = 1 << 30
	overlayMaxBytes = 1 << 40
	overlayBlock    = 4096
)

// makeRootFS writes the tree as a read-only erofs. Blocks are stored uncompressed: the image is read through the host's
// page cache, and a guest under emulation decompresses slowly (measured; see docs/IMAGES.md).
//
// Times newer than epoch are clamped to it and older ones kept: a fixed time for all files would make every .pyc look
// stale, and each guest would compile its Python again.
func (b *builder) makeRootFS(ctx context.Context, tree, file string, epoch int64) error {
	return run(ctx, tool{
		name: "mkfs.erofs",
		args: []string{"--quiet", "-U", rootFSUUID, file, tree},
		env:  []string{"SOURCE_DATE_EPOCH=" + strconv.FormatInt(epoch, 10)},
		log:  b.log,
	})
}

// overlayMountOptions are in the overlay's superblock, so that every mount gets them: no background thread that
// writes zeros into inode tables (after growth, which else starts one), and none that reads all block bitmaps ahead.
const overlayMountOptions = "noinit_itable,no_prefetch_block_bitmaps"

// OverlayArgs are the arguments of mkfs.ext4 without the file. Features are listed in full, so that the host's
// mke2fs.conf does not matter.
//
//   - No journal: a sandbox's disk is only ever taken together with its memory, so there is nothing to replay, and a
//     journal would write every block of metadata twice into the checkpoint.
//   - Block group checksums (uninit_bg) let a grown file system leave bitmaps and inode tables unread. In the first
//     gigabyte the tables are marked as zeroed, which they are: the file is sparse.
//   - Reserved group descriptors (resize=) are what online growth to overlayMaxBytes uses.
func OverlayArgs() []string {
	return []string{
		"-q", "-F", "-L", "overlay", "-U", overlayUUID, "-m", "0", "-b", strconv.Itoa(overlayBlock), "-I", "256", "-i", "16384", "-G", "16",
		"-O", "none,extent,filetype,flex_bg,sparse_super,large_file,huge_file,uninit_bg,dir_index,dir_nlink,extra_isize,ext_attr,resize_inode",
		"-E", fmt.Sprintf("resize=%d,lazy_itable_init=0,nodiscard,root_owner=0:0,hash_seed=%s", overlayMaxBytes/overlayBlock, overlayHashSeed),
	}
}

// makeOverlay writes the empty writable disk: an ext4 that can grow while it is mounted. A kernel has nothing left to
// initialise on it, so an idle guest writes nothing. Blocks of zeros take no space.
func (b *builder) makeOverlay(ctx context.Context, file string) (images.File, error) {
	done := b.stage("overlay", "making the overlay disk")
	raw := file + ".raw"
	if err := b.formatOverlay(ctx, raw); err != nil {
		return images.File{}, fmt.Errorf("make overlay disk: %w", err)
	}
	fingerprint, err := copyNonZero(raw, file)
	if err = errors.Join(err, os.Remove(raw)); err != nil {
		return images.File{}, fmt.Errorf("make overlay disk: %w", err)
	}
	// Hashing a gigabyte of zeros takes seconds. The fingerprint covers everything else, so files with the same
	// fingerprint have the same digest.
	key, err := images.CacheKey(images.KindOverlay, fingerprint)
	if err != nil {
		return images.File{}, err
	}
	var f images.File
	if !b.store.CacheGet(key, &f) {
		if f, err = images.HashFile(file); err == nil {
			err = b.store.CachePut(key, f)
		}
	}
	done("made the overlay disk")
	return f, err
}

func (b *builder) formatOverlay(ctx context.Context, raw string) error {
	f, err := os.OpenFile(raw, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(overlayBytes); err != nil {
		return err
	}
	// Two names of the same variable: before e2fsprogs 1.47.1 and since.
	env := []string{"E2FSPROGS_FAKE_TIME=1000000000", "SOURCE_DATE_EPOCH=1000000000", "MKE2FS_CONFIG=/dev/null"}
	if err := run(ctx, tool{name: "mkfs.ext4", args: append(OverlayArgs(), raw), env: env, log: b.log}); err != nil {
		return err
	}
	// tune2fs cannot write a list, because it uses the comma as its own separator.
	set := "set_super_value mount_opts " + overlayMountOptions
	if err := run(ctx, tool{name: "debugfs", args: []string{"-w", "-R", set, raw}, env: env, log: b.log}); err != nil {
		return err
	}
	return checkMountOptions(f) // debugfs ends with status 0 whatever happens
}

// mountOptionsOffset is where ext4's superblock has its default mount options (s_mount_opts, 64 bytes).
const mountOptionsOffset = 1024 + 0x200

func checkMountOptions(f *os.File) error {
	var raw [64]byte
	if _, err := f.ReadAt(raw[:], mountOptionsOffset); err != nil {
		return fmt.Errorf("read the overlay's superblock: %w", err)
	}
	if got := string(bytes.TrimRight(raw[:], "\x00")); got != overlayMountOptions {
		return core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed, "debugfs did not set the overlay's mount options; they are %q", core.Clip(got))
	}
	return nil
}

// copyNonZero makes a copy in which every block of zeros is a hole, and returns a digest of the size and of the other
// blocks with their places. SEEK_DATA alone is not enough: what mkfs wrote as zeros is allocated.
func copyNonZero(from, to string) (_ core.Digest, err error) {
	in, err := os.Open(from)
	if err != nil {
		return "", err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	defer func() { err = joinClose(err, out) }()
	info, err := in.Stat()
	if err != nil {
		return "", err
	}
	if err := out.Truncate(info.Size()); err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "%d\n", info.Size())
	buf, zero := make([]byte, overlayBlock), make([]byte, overlayBlock)
	for at := int64(0); at < info.Size(); at += overlayBlock {
		start, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // only a hole is left
		}
		if err != nil {
			return "", fmt.Errorf("find data: %w", err)
		}
		at = start - start%overlayBlock
		n, err := in.ReadAt(buf, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("read %s: %w", filepath.Base(from), err)
		}
		if bytes.Equal(buf[:n], zero[:n]) {
			continue
		}
		fmt.Fprintf(h, "%d %d\n", at, n)
		h.Write(buf[:n])
		if _, err := out.WriteAt(buf[:n], at); err != nil {
			return "", fmt.Errorf("write %s: %w", filepath.Base(to), err)
		}
	}
	return core.ParseDigest("sha256:" + hex.EncodeToString(h.Sum(nil)))
}
