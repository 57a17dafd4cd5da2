package host

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Why a record of the spool was not taken as it is.
const (
	tooLong    = "too_long"   // it was not read
	unreadable = "unreadable" // it is no record
	wasClipped = "clipped"    // it is longer than any of this version, and was told with its texts clipped
)

// The bounds of records that were set aside: files, and bytes of each.
const (
	asideFiles = 64
	asideSize  = 64 << 10
	asideName  = "aside-"
)

// aside keeps damaged records of the spool for the operator of the host, so that they do not block others.
type aside struct {
	dir   *os.Root
	log   *slog.Logger
	found map[string]int64 // by why, since the start of this process
}

// line sets a line aside.
func (a *aside) line(seg *segment, off int64, text []byte, why string) {
	a.found[why]++
	if err := a.keep(fmt.Sprintf("%s%d-%d", asideName, seg.first, off), text); err != nil && !errors.Is(err, fs.ErrExist) {
		a.log.Warn("a record that was set aside was not kept", "segment", seg.name(), "offset", off, "err", err)
	}
}

func (a *aside) keep(name string, text []byte) error {
	list, err := fs.ReadDir(a.dir.FS(), ".")
	if err != nil {
		return err
	}
	n := 0
	for _, e := range list {
		if strings.HasPrefix(e.Name(), asideName) {
			n++
		}
	}
	if n >= asideFiles {
		return nil // it is counted
	}
	f, err := a.dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text[:min(len(text), asideSize)])
	return errors.Join(err, f.Close())
}

// segment sets a whole file aside. The error is one that is not of the file, such as that this process has too many open.
func (a *aside) segment(name string, cause error) error {
	if errors.Is(cause, unix.EMFILE) || errors.Is(cause, unix.ENFILE) || errors.Is(cause, unix.ENOMEM) {
		return cause
	}
	a.found[unreadable]++
	a.log.Error("a segment of the spool cannot be read and is set aside", "segment", name, "err", cause)
	if err := a.dir.Rename(name, asideName+name); err != nil {
		return errors.Join(cause, fmt.Errorf("set %s aside: %w", name, err))
	}
	return nil
}

// tell logs the findings.
func (a *aside) tell() {
	for why, n := range a.found {
		a.log.Error("damaged records in the spool of flows", "why", why, "count", n, "kept_as", asideName+"*")
	}
}
