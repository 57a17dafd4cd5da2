package ext4

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
)

// The places of ext4test.Tiny: 64 blocks of 4 KiB, written by mkfs.ext4 and debugfs.
const (
	tinyTable = 34 * 4096              // inodes
	tinyUpper = tinyTable + (12-1)*256 // a directory, whose entries are in block 8
	tinyFile  = tinyTable + (14-1)*256 // a file of three blocks with an attribute in block 21
	tinyDir   = 8 * 4096
	tinyXattr = 21 * 4096
	tinySuper = superblockAt
	extents   = 0x28 // in an inode
)

// explore reads all that can be reached, goes on where it cannot, and returns what was wrong. It ends whatever the disk says.
func explore(b []byte) []error {
	fs, err := Open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return []error{err}
	}
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	seen := map[uint32]bool{Root: true}
	for todo := []uint32{Root}; len(todo) > 0; todo = todo[1:] {
		in, err := fs.Inode(todo[0])
		if note(err); err != nil {
			continue
		}
		_, err = fs.Xattrs(in)
		note(err)
		switch in.Type() {
		case TypeDir:
			list, err := fs.ReadDir(in)
			note(err)
			for _, e := range list {
				if !seen[e.Inode] {
					seen[e.Inode] = true
					todo = append(todo, e.Inode)
				}
			}
		case TypeSymlink:
			_, err := fs.Readlink(in)
			note(err)
		case TypeRegular:
			x, err := fs.Extents(in)
			note(err)
			note(fs.ReadExtents(x, make([]byte, min(in.Size, 1<<16)), 0))
			note(fs.ReadExtents(x, make([]byte, 100), max(in.Size-50, 0)))
		}
	}
	return errs
}

func TestHostile(t *testing.T) {
	t.Parallel()
	good := ext4test.Tiny(t)
	if errs := explore(good); len(errs) > 0 {
		t.Fatal(errs)
	}
	le := binary.LittleEndian
	for name, x := range map[string]struct {
		change func(b []byte)
		want   string // in one of the errors; "" for nothing wrong
	}{
		"no superblock":                {func(b []byte) { b[tinySuper+0x38] = 0 }, "no superblock"},
		"a journal to replay":          {func(b []byte) { b[tinySuper+0x60] |= 4 }, "features 0x4"},
		"64-bit":                       {func(b []byte) { b[tinySuper+0x60] |= 0x80 }, "features 0x80"},
		"no extents":                   {func(b []byte) { b[tinySuper+0x60] &^= 0x40 }, "no extents"},
		"huge blocks":                  {func(b []byte) { b[tinySuper+0x18] = 60 }, "2^70 bytes"},
		"more blocks than the disk":    {func(b []byte) { le.PutUint32(b[tinySuper+4:], 65) }, "65 blocks"},
		"no blocks":                    {func(b []byte) { le.PutUint32(b[tinySuper+4:], 0) }, "0 blocks"},
		"inodes larger than a block":   {func(b []byte) { le.PutUint16(b[tinySuper+0x58:], 8192) }, "inodes have 8192 bytes"},
		"inodes of no size":            {func(b []byte) { le.PutUint16(b[tinySuper+0x58:], 0) }, "inodes have 0 bytes"},
		"no inodes in a group":         {func(b []byte) { le.PutUint32(b[tinySuper+0x28:], 0) }, "0 in each"},
		"more inodes than groups hold": {func(b []byte) { le.PutUint32(b[tinySuper:], 1<<31) }, "inodes, 32 in each"},
		"no blocks in a group":         {func(b []byte) { le.PutUint32(b[tinySuper+0x20:], 0) }, "groups have 0 blocks"},
		"inode table outside":          {func(b []byte) { le.PutUint32(b[4096+8:], 1<<31) }, "block 2147483648 is outside"},
		"inode table in block 0":       {func(b []byte) { le.PutUint32(b[4096+8:], 0) }, "block 0 is outside"},
		"a free inode with a name":     {func(b []byte) { le.PutUint16(b[tinyFile+0x1A:], 0) }, "inode 14 is free"},
		"an inode of no type":          {func(b []byte) { le.PutUint16(b[tinyFile:], 0o644) }, "has the mode"},
		"a negative size":              {func(b []byte) { le.PutUint32(b[tinyFile+0x6C:], 1<<31) }, "inode 14 has -"},
		"a size beyond all":            {func(b []byte) { le.PutUint32(b[tinyFile+0x6C:], 1<<30) }, "inode 14 has 46"},
		"a sparse file of 15 TiB":      {func(b []byte) { le.PutUint32(b[tinyFile+0x6C:], 0xF00) }, ""},
		"extra fields beyond":          {func(b []byte) { le.PutUint16(b[tinyFile+0x80:], 300) }, "300 more bytes"},
		"block map":                    {func(b []byte) { le.PutUint32(b[tinyFile+0x20:], 0) }, "no extents"},
		"extents of another magic":     {func(b []byte) { b[tinyFile+extents] = 0 }, "is not one"},
		"more extents than fit":        {func(b []byte) { le.PutUint16(b[tinyFile+extents+2:], 5) }, "is not one"},
		"a deep tree":                  {func(b []byte) { le.PutUint16(b[tinyFile+extents+6:], 6) }, "the depth 6"},
		"a tree that holds itself": {func(b []byte) { // a root of depth 5 whose child is a node of depth 4 whose child is itself
			le.PutUint16(b[tinyFile+extents+6:], 5)
			copy(b[tinyFile+extents+12:], []byte{0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0})
			copy(b[10*4096:], []byte{0x0A, 0xF3, 1, 0, 4, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0})
		}, "the depth 4"},
		"an empty node": {func(b []byte) {
			le.PutUint16(b[tinyFile+extents+6:], 1)
			copy(b[tinyFile+extents+12:], []byte{0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0})
			copy(b[10*4096:], []byte{0x0A, 0xF3, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0})
		}, "the depth 0"},
		"blocks outside":           {func(b []byte) { le.PutUint32(b[tinyFile+extents+20:], 62) }, "blocks outside"},
		"blocks beyond 32 bits":    {func(b []byte) { le.PutUint16(b[tinyFile+extents+18:], 1) }, "blocks outside"},
		"an extent of no length":   {func(b []byte) { le.PutUint16(b[tinyFile+extents+16:], 0) }, "out of order"},
		"an unwritten extent":      {func(b []byte) { le.PutUint16(b[tinyFile+extents+16:], 32768+3) }, ""},
		"extents one over another": {func(b []byte) { b[tinyFile+extents+2] = 2; copy(b[tinyFile+extents+24:], b[tinyFile+extents+12:][:12]) }, "out of order"},
		"a file of one block": {func(b []byte) { // in four extents that say the same
			le.PutUint32(b[tinyFile+4:], 4*30<<12)
			b[tinyFile+extents+2] = 4
			for i := range uint32(4) {
				at := tinyFile + extents + 12 + 12*int(i)
				le.PutUint32(b[at:], 30*i)
				le.PutUint32(b[at+4:], 30)
				le.PutUint32(b[at+8:], 10)
			}
		}, "more blocks than the disk"},
		"an extent beyond the file": {func(b []byte) { le.PutUint32(b[tinyFile+4:], 1) }, ""},
		"a directory of odd size":   {func(b []byte) { le.PutUint32(b[tinyUpper+4:], 100) }, "of 100 bytes"},
		"a huge directory":          {func(b []byte) { le.PutUint32(b[tinyUpper+0x6C:], 1) }, "bytes"},
		"an entry of no length":     {func(b []byte) { le.PutUint16(b[tinyDir+4:], 0) }, "has 0 bytes"},
		"an entry beyond its block": {func(b []byte) { le.PutUint16(b[tinyDir+4:], 5000) }, "has 5000 bytes"},
		"an entry of odd length":    {func(b []byte) { le.PutUint16(b[tinyDir+4:], 11) }, "has 11 bytes"},
		"a name beyond its entry":   {func(b []byte) { b[tinyDir+6] = 255 }, "has 12 bytes"},
		"a name without letters":    {func(b []byte) { b[tinyDir+24+6] = 0 }, "no file can have"},
		"a name with a slash":       {func(b []byte) { b[tinyDir+24+8] = '/' }, "no file can have"},
		"a name twice":              {func(b []byte) { b[tinyDir+24+8] = 'b' }, "a name twice"},
		"a name of no inode":        {func(b []byte) { le.PutUint32(b[tinyDir+24:], 4000) }, "no inode 4000"},
		"a directory in itself":     {func(b []byte) { le.PutUint32(b[tinyDir+24:], 12) }, ""},
		"attributes outside":        {func(b []byte) { le.PutUint32(b[tinyFile+0x68:], 64) }, "block 64 is outside"},
		"attributes far outside":    {func(b []byte) { le.PutUint16(b[tinyFile+0x76:], 1) }, "outside of the disk"},
		"attributes that are none":  {func(b []byte) { le.PutUint32(b[tinyFile+0x68:], 8) }, "are none"},
		"an attribute cut off":      {func(b []byte) { b[tinyXattr+32+1] = 1; le.PutUint16(b[tinyXattr+32+2:], 4000) }, "value is cut off"},
		"an attribute elsewhere":    {func(b []byte) { b[tinyXattr+32+4] = 1 }, "an inode of its own"},
		"values one over another": {func(b []byte) {
			for at := tinyXattr + 32; at < tinyXattr+4000; at += 16 {
				copy(b[at:], []byte{0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0})
			}
		}, "value is cut off"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := bytes.Clone(good)
			x.change(b)
			errs := explore(b)
			for _, err := range errs {
				_, isDamage := errors.AsType[*DamagedError](err)
				_, isForeign := errors.AsType[*UnsupportedError](err)
				if !isDamage && !isForeign {
					t.Errorf("%v is neither damage nor unsupported", err)
				}
			}
			if all := errors.Join(errs...); x.want == "" && all != nil || x.want != "" && (all == nil || !strings.Contains(all.Error(), x.want)) {
				t.Errorf("got %v, want %q", all, x.want)
			}
		})
	}
}

func TestCutOff(t *testing.T) {
	t.Parallel()
	good := ext4test.Tiny(t)
	for n := 0; n < len(good); n += 511 {
		if _, err := Open(bytes.NewReader(good[:n]), int64(n)); err == nil {
			t.Fatalf("a disk cut off at %d bytes was opened", n)
		}
	}
}

// FuzzRead changes places of a real disk: each is four bytes of offset, one of length and the new bytes.
func FuzzRead(f *testing.F) {
	good := ext4test.Tiny(f)
	patch := func(at uint32, b ...byte) []byte {
		return append(append(binary.LittleEndian.AppendUint32(nil, at), byte(len(b))), b...)
	}
	f.Add([]byte(nil))
	f.Add(patch(tinyFile+extents+6, 1))
	f.Add(patch(tinyDir+4, 0))
	f.Add(append(patch(tinySuper+0x58, 0, 16), patch(tinyUpper+4, 255, 255)...))
	f.Add(patch(tinyXattr+32, 255, 1, 255))
	f.Fuzz(func(t *testing.T, changes []byte) {
		b := bytes.Clone(good)
		for len(changes) >= 5 {
			at, n := int(binary.LittleEndian.Uint32(changes))%len(b), int(changes[4])
			n = min(n, len(changes)-5)
			copy(b[at:], changes[5:5+n])
			changes = changes[5+n:]
		}
		for _, err := range explore(b) {
			_, isDamage := errors.AsType[*DamagedError](err)
			_, isForeign := errors.AsType[*UnsupportedError](err)
			if !isDamage && !isForeign {
				t.Errorf("%v is neither damage nor unsupported", err)
			}
		}
	})
}
