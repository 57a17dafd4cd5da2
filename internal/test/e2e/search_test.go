package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/coppice-dev/coppice/internal/sparse"
)

// search looks for values in every form in which somebody may have written them down.
type search struct {
	forms map[string]string // what is looked for, by its name
	found map[string]int    // by places

	bytes           int64
	pieces, without int
}

func newSearch(values ...string) *search {
	s := &search{forms: map[string]string{}, found: map[string]int{}}
	for _, v := range values {
		add := func(name, form string) {
			for _, f := range s.forms {
				if f == form {
					return
				}
			}
			s.forms[name+" of "+v[:12]] = form
		}
		add("the text", v)
		add("the URL form", url.QueryEscape(v))
		add("the form of a path", url.PathEscape(v))
		add("hexadecimal", hex.EncodeToString([]byte(v)))
		add("upper-case hexadecimal", strings.ToUpper(hex.EncodeToString([]byte(v))))
		add("a JSON form", strings.ReplaceAll(v, "/", `\/`))
		for shift := range 3 {
			text := base64.StdEncoding.EncodeToString(append(bytes.Repeat([]byte{'x'}, shift), v...))
			text = strings.TrimRight(text, "=")
			add(fmt.Sprint("base64 from ", shift), text[(shift*8+5)/6:len(text)-1]) // what is not shared with the bytes around it
			add(fmt.Sprint("URL base64 from ", shift), strings.NewReplacer("+", "-", "/", "_").Replace(text[(shift*8+5)/6:len(text)-1]))
		}
	}
	return s
}

// in names the forms that there are.
func (s *search) in(b []byte) (found []string) {
	s.bytes += int64(len(b))
	s.pieces++
	for name, form := range s.forms {
		if bytes.Contains(b, []byte(form)) {
			found = append(found, name)
		}
	}
	if found == nil {
		s.without++
	}
	slices.Sort(found)
	return found
}

// readAll gives everything that is written in the files below a directory, in pieces that overlap, and every frame of zstd that is in them,
// unpacked. Files that vanish meanwhile are left out, and the volume that is mounted among them.
func readAll(dir string, each func(path string, b []byte)) error {
	unpack, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(64<<20))
	if err != nil {
		return err
	}
	defer unpack.Close()
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.Type().IsRegular() || d.Name() == "volume.xfs" { // its files are read where it is mounted
			return err
		}
		err = readFile(path, unpack, each)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

func readFile(path string, unpack *zstd.Decoder, each func(path string, b []byte)) error {
	const piece, overlap = 16 << 20, 1 << 20 // a frame has at most a mebibyte
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	ranges, err := sparse.Data(f)
	if err != nil {
		return err
	}
	b := make([]byte, piece+overlap)
	for _, r := range ranges {
		for at := r.Offset; at < r.End(); at += piece {
			n, err := f.ReadAt(b[:min(int64(len(b)), r.End()-at)], at)
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			each(path, b[:n])
			frames(b[:n], unpack, func(frame []byte) { each(path+", a frame", frame) })
		}
	}
	return nil
}

// frames unpacks what looks like frames of zstd.
func frames(b []byte, unpack *zstd.Decoder, each func([]byte)) {
	for at := 0; ; {
		i := bytes.Index(b[at:], zstdMagic)
		if i < 0 {
			return
		}
		at += i
		n := frameLen(b[at:])
		if n == 0 {
			at += len(zstdMagic)
			continue
		}
		if out, err := unpack.DecodeAll(b[at:at+n], nil); err == nil {
			each(out)
			at += n
		} else {
			at += len(zstdMagic)
		}
	}
}

// frameLen is how long a frame without a checksum is; 0 when it is none (RFC 8878, 3.1.1).
func frameLen(b []byte) int {
	var h zstd.Header
	if h.Decode(b) != nil || h.Skippable {
		return 0
	}
	for at := h.HeaderSize; at+3 <= len(b); {
		block := int(b[at]) | int(b[at+1])<<8 | int(b[at+2])<<16
		size := block >> 3
		if block>>1&3 == 1 { // one byte, repeated
			size = 1
		}
		at += 3 + size
		if block&1 == 1 && at <= len(b) {
			return at
		}
	}
	return 0
}
