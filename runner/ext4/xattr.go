package ext4

import (
	"encoding/binary"
	"fmt"
)

const (
	xattrMagic     = 0xEA020000
	xattrEntry     = 16 // without the name
	xattrHead      = 32 // of a block
	xattrInodeHead = 4
)

// xattrPrefixes are what the numbers in front of names stand for.
var xattrPrefixes = map[byte]string{1: "user.", 2: "system.posix_acl_access", 3: "system.posix_acl_default", 4: "trusted.", 6: "security.", 7: "system."}

// Xattrs returns a file's extended attributes.
func (fs *FS) Xattrs(in *Inode) (map[string]string, error) {
	out := make(map[string]string)
	if b := in.attribute; len(b) >= xattrInodeHead && binary.LittleEndian.Uint32(b) == xattrMagic {
		if err := parseXattrs(out, b[xattrInodeHead:], b[xattrInodeHead:]); err != nil {
			return nil, fmt.Errorf("inode %d: %w", in.Number, err)
		}
	}
	if in.acl == 0 {
		return out, nil
	}
	b, err := fs.block(in.acl)
	if err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint32(b) != xattrMagic {
		return nil, damaged("the attributes of inode %d are none", in.Number)
	}
	if err := parseXattrs(out, b[xattrHead:], b); err != nil {
		return nil, fmt.Errorf("inode %d: %w", in.Number, err)
	}
	return out, nil
}

// parseXattrs reads entries up to the four zero bytes behind the last. Values are counted from the beginning of values.
func parseXattrs(out map[string]string, entries, values []byte) error {
	le := binary.LittleEndian
	room := len(values) // honest values do not overlap
	for len(entries) >= 4 && le.Uint32(entries) != 0 {
		if len(entries) < xattrEntry || len(entries) < xattrEntry+int(entries[0]) {
			return damaged("an attribute is cut off")
		}
		at, size := int64(le.Uint16(entries[2:])), int64(le.Uint32(entries[8:]))
		prefix, known := xattrPrefixes[entries[1]]
		switch {
		case le.Uint32(entries[4:]) != 0:
			return damaged("an attribute has an inode of its own")
		case at+size > int64(len(values)) || size > int64(room):
			return damaged("an attribute's value is cut off")
		case known:
			out[prefix+string(entries[xattrEntry:][:entries[0]])] = string(values[at : at+size])
		}
		room -= int(size)
		entries = entries[min(len(entries), (xattrEntry+int(entries[0])+3)&^3):]
	}
	return nil
}
