package runner

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/internal/confine/confinetest"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/runner/diffhelper"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

var long = flag.Bool("long", false, "compare disks with 20,000 files, and not with 2,000")

const beAPager = "be-a-pager"

// TestMain runs the tests, or is a pager or an egress process if it was started with that argument.
func TestMain(m *testing.M) {
	confine.Enter(diffhelper.Task(), diffhelper.FilesTask())
	testegress.Enter()
	confinetest.AllowWithoutRoot(m)
	if len(os.Args) > 1 {
		be := map[string]func(io.Reader) error{beAPager: servePages}[os.Args[1]]
		if be != nil {
			if err := be(os.Stdin); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// servePages is a pager in a directory, with an empty store.
func servePages(config io.Reader) (err error) {
	dir, err := io.ReadAll(config)
	if err != nil {
		return err
	}
	empty, err := os.MkdirTemp("", "store")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(empty)) }()
	store, err := bloburl.Dial("dir:"+empty, s3.Credentials{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	s, err := pager.New(pager.Config{Dir: string(dir), Blobs: store, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}
