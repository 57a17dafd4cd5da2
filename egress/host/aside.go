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

// The reasons why a record of the spool is not taken unchanged.
const (
	tooLong    = "too_long"   // too long to be read
	unreadable = "unreadable" // not a record
	wasClipped = "clipped"    // longer than the bound of this version; reported with clipped texts
)

// The bounds of what is set aside: number of files, bytes of one record, and bytes in total.
const (
	asideFiles = 64
	asideSize  = 64 << 10
	asideBytes = 8 * segmentSize
	asideName  = "aside-"
)

// aside keeps damaged records of the spool for the operator of the host, so that they do not block others.
type aside struct {
	dir   *os.Root
	log   *slog.Logger
	found map[string]int64 // count by reason, since the start of this process
}

// line sets a line aside.
func (a *aside) line(seg *segment, off int64, text []byte, why string) {
	a.found[why]++
	if err := a.keep(fmt.Sprintf("%s%d-%d", asideName, seg.first, off), text); err != nil && !errors.Is(err, fs.ErrExist) {
		a.log.Warn("a damaged record was not kept", "segment", seg.name(), "offset", off, "err", err)
	}
}

// takes reports whether there is room for another file of a size.
func (a *aside) takes(size int64) (bool, error) {
	list, err := fs.ReadDir(a.dir.FS(), ".")
	if err != nil {
		return false, err
	}
	n := 0
	for _, e := range list {
		if !strings.HasPrefix(e.Name(), asideName) {
			continue
		}
		info, err := e.Info()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		if err == nil {
			n, size = n+1, size+info.Size()
		}
	}
	return n < asideFiles && size <= asideBytes, nil
}

func (a *aside) keep(name string, text []byte) error {
	text = text[:min(len(text), asideSize)]
	if takes, err := a.takes(int64(len(text))); err != nil || !takes {
		return err // the caller has counted it
	}
	f, err := a.dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}

// segment sets a whole file aside, or removes the file if there is no room for it. It returns an
// error that does not come from the file, for example that this process has too many open files.
func (a *aside) segment(name string, cause error) error {
	if errors.Is(cause, unix.EMFILE) || errors.Is(cause, unix.ENFILE) || errors.Is(cause, unix.ENOMEM) {
		return cause
	}
	a.found[unreadable]++
	info, err := a.dir.Lstat(name)
	if err != nil {
		return errors.Join(cause, err)
	}
	takes, err := a.takes(info.Size())
	if err != nil {
		return errors.Join(cause, err)
	}
	a.log.Error("a segment of the spool cannot be read and is set aside", "segment", name, "bytes", info.Size(), "kept", takes, "err", cause)
	if takes {
		err = a.dir.Rename(name, asideName+name)
	} else {
		err = a.dir.RemoveAll(name)
	}
	if err != nil {
		return errors.Join(cause, fmt.Errorf("set %s aside: %w", name, err))
	}
	return nil
}

// logFound logs how many damaged records were found.
func (a *aside) logFound() {
	for why, n := range a.found {
		a.log.Error("damaged records in the spool of flows", "why", why, "count", n, "kept_as", asideName+"*")
	}
}
