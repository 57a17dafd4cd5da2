package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/internal/test/testvm"
)

// makePayload makes the disk with all that the suites need which the machine cannot make itself.
func makePayload(ctx context.Context, cfg config, tmp string, list []suite, log io.Writer) (disk string, err error) {
	tree := filepath.Join(tmp, "payload")
	if err := os.RemoveAll(tree); err != nil {
		return "", err
	}
	within := func(path string) string { return filepath.Join(tree, path[len(payloadDir):]) }
	if err := os.MkdirAll(within(preparedDir), 0o755); err != nil { //nolint:gosec // G301: tests' own users read it
		return "", err
	}
	_, _ = fmt.Fprintln(log, "kvmlane: preparing an image and programs")
	if err := testvm.Prepare(ctx, within(preparedDir), "cmd/coppice", "internal/test/e2e/guestprobe"); err != nil {
		return "", err
	}
	for _, s := range list {
		if _, err := os.Stat(within(s.binary())); err == nil {
			continue
		}
		_, _ = fmt.Fprintln(log, "kvmlane: compiling the tests of", s.pkg)
		if err := goBuild(ctx, "test", "-c", "-tags="+s.tags, "-o", within(s.binary()), "./"+s.pkg); err != nil {
			return "", err
		}
		data := filepath.Join(s.pkg, "testdata")
		if _, err := os.Stat(data); err != nil {
			continue
		}
		if err := os.CopyFS(filepath.Join(within(s.dir()), "testdata"), os.DirFS(data)); err != nil {
			return "", err
		}
	}
	if cfg.cloudHypervisor != "" {
		if err := copyProgram(cfg.cloudHypervisor, within(chProgram)); err != nil {
			return "", err
		}
	}
	size, err := treeSize(tree)
	if err != nil {
		return "", err
	}
	disk = filepath.Join(tmp, "payload.ext4")
	const roomMiB = 1 << 10 // the store of images makes files of its own
	return disk, errors.Join(makeDisk(ctx, tree, disk, int(size>>20)*11/10+roomMiB), os.RemoveAll(tree))
}

func copyProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755) //nolint:gosec // G302: a program
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

func treeSize(dir string) (int64, error) {
	var n int64
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		n += info.Size()
		return nil
	})
	return n, err
}
