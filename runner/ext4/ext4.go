package ext4

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// DamagedError says that the disk does not hold what its structures say.
type DamagedError struct{ what string }

func (e *DamagedError) Error() string { return "the file system is damaged: " + e.what }

// UnsupportedError says that the disk has a file system that this package does not read.
type UnsupportedError struct{ what string }

func (e *UnsupportedError) Error() string {
	return "the file system is not one that can be read: " + e.what
}

func damaged(format string, a ...any) error { return &DamagedError{fmt.Sprintf(format, a...)} }

func unsupported(format string, a ...any) error { return &UnsupportedError{fmt.Sprintf(format, a...)} }

// What the superblock may ask of a reader (s_feature_incompat).
const (
	incompatFiletype = 0x0002
	incompatExtents  = 0x0040
	incompatFlexBG   = 0x0200
	incompatKnown    = incompatFiletype | incompatExtents | incompatFlexBG
)

const (
	superblockAt   = 1024
	superblockSize = 1024
	magic          = 0xEF53
	descriptorSize = 32
	oldInodeSize   = 128
)

// Root is the inode of the root directory.
const Root = 2

// FS is one disk. It is not safe for concurrent use.
type FS struct {
	r              io.ReaderAt
	blockSize      int64
	blocks         int64 // what the file system says it has, never more than the file
	inodes         uint32
	inodesPerGroup uint32
	inodeSize      int64
	groups         int64
	descriptorsAt  int64 // bytes

	cache [cacheBlocks]cachedBlock
}

// cacheBlocks is how many blocks of metadata are kept: neighbours in a directory are often neighbours in an inode table.
const cacheBlocks = 64

type cachedBlock struct {
	number int64 // 0 for none: block 0 is never asked for
	data   []byte
}

// Open reads the superblock of a disk of size bytes.
func Open(r io.ReaderAt, size int64) (*FS, error) {
	var b [superblockSize]byte
	if _, err := r.ReadAt(b[:], superblockAt); err != nil {
		if size < superblockAt+superblockSize {
			return nil, damaged("the disk has only %d bytes", size)
		}
		return nil, fmt.Errorf("read the superblock: %w", err)
	}
	le := binary.LittleEndian
	if le.Uint16(b[0x38:]) != magic {
		return nil, damaged("there is no superblock")
	}
	if unknown := le.Uint32(b[0x60:]) &^ incompatKnown; unknown != 0 {
		return nil, unsupported("it has the features %#x", unknown)
	}
	if le.Uint32(b[0x4C:]) != 1 || le.Uint32(b[0x60:])&(incompatExtents|incompatFiletype) != incompatExtents|incompatFiletype {
		return nil, unsupported("it has no extents, or is of the first revision")
	}
	shift := le.Uint32(b[0x18:])
	if shift > 6 {
		return nil, damaged("its blocks have 2^%d bytes", shift+10)
	}
	fs := &FS{
		r: r, blockSize: 1024 << shift, blocks: int64(le.Uint32(b[0x04:])), inodes: le.Uint32(b[0x00:]),
		inodesPerGroup: le.Uint32(b[0x28:]), inodeSize: int64(le.Uint16(b[0x58:])),
	}
	perGroup, first := int64(le.Uint32(b[0x20:])), int64(le.Uint32(b[0x14:]))
	switch {
	case fs.blocks == 0 || fs.blocks > size/fs.blockSize:
		return nil, damaged("it says that it has %d blocks of %d bytes on a disk of %d bytes", fs.blocks, fs.blockSize, size)
	case fs.inodeSize < oldInodeSize || fs.inodeSize > fs.blockSize || fs.inodeSize&(fs.inodeSize-1) != 0:
		return nil, damaged("its inodes have %d bytes", fs.inodeSize)
	case perGroup == 0 || perGroup > 8*fs.blockSize || first != btoi(fs.blockSize == 1024) || first >= fs.blocks:
		return nil, damaged("its groups have %d blocks from block %d on", perGroup, first)
	}
	fs.groups = (fs.blocks - first + perGroup - 1) / perGroup
	if fs.inodesPerGroup == 0 || int64(fs.inodesPerGroup) > 8*fs.blockSize || int64(fs.inodes) != fs.groups*int64(fs.inodesPerGroup) {
		return nil, damaged("it has %d inodes, %d in each of %d groups", fs.inodes, fs.inodesPerGroup, fs.groups)
	}
	fs.descriptorsAt = (first + 1) * fs.blockSize
	return fs, nil
}

func btoi(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// BlockSize is the unit of extents, in bytes.
func (fs *FS) BlockSize() int64 { return fs.blockSize }

// block reads one block of metadata. The bytes are valid until the next call.
func (fs *FS) block(number int64) ([]byte, error) {
	if number <= 0 || number >= fs.blocks {
		return nil, damaged("block %d is outside of the disk", number)
	}
	c := &fs.cache[number%cacheBlocks]
	if c.number == number {
		return c.data, nil
	}
	if c.data == nil {
		c.data = make([]byte, fs.blockSize)
	}
	c.number = 0
	if _, err := fs.r.ReadAt(c.data, number*fs.blockSize); err != nil {
		return nil, fmt.Errorf("read block %d: %w", number, err)
	}
	c.number = number
	return c.data, nil
}

// The file types in an inode's mode, as in stat(2).
const (
	TypeMask    = 0o170000
	TypeFIFO    = 0o010000
	TypeChar    = 0o020000
	TypeDir     = 0o040000
	TypeBlock   = 0o060000
	TypeRegular = 0o100000
	TypeSymlink = 0o120000
	TypeSocket  = 0o140000
)

// Inode is a file, whatever its type.
type Inode struct {
	Number   uint32
	Mode     uint16 // type and permissions, as in stat(2)
	UID, GID uint32
	Size     int64
	ModTime  time.Time
	Rdev     uint32 // of a device, as the disk has it; 0 for 0:0 only

	flags     uint32
	acl       int64    // block of extended attributes, 0 for none
	content   [60]byte // extents, or a short symlink's target
	attribute []byte   // what follows the fields: extended attributes
}

// Type is the file type.
func (in *Inode) Type() uint16 { return in.Mode & TypeMask }

const flagExtents = 0x80000

// Inode reads an inode. A free inode is Damaged: the entry that refers to it is wrong.
func (fs *FS) Inode(number uint32) (*Inode, error) {
	if number == 0 || number > fs.inodes {
		return nil, damaged("there is no inode %d", number)
	}
	group, index := int64((number-1)/fs.inodesPerGroup), int64((number-1)%fs.inodesPerGroup)
	at := fs.descriptorsAt + group*descriptorSize
	descriptor, err := fs.block(at / fs.blockSize)
	if err != nil {
		return nil, err
	}
	table := int64(binary.LittleEndian.Uint32(descriptor[at%fs.blockSize+8:]))
	at = index * fs.inodeSize
	b, err := fs.block(table + at/fs.blockSize)
	if err != nil {
		return nil, err
	}
	return parseInode(number, b[at%fs.blockSize:][:fs.inodeSize])
}

func parseInode(number uint32, b []byte) (*Inode, error) {
	le := binary.LittleEndian
	in := &Inode{
		Number: number, Mode: le.Uint16(b), UID: uint32(le.Uint16(b[0x02:])) | uint32(le.Uint16(b[0x78:]))<<16,
		GID:  uint32(le.Uint16(b[0x18:])) | uint32(le.Uint16(b[0x7A:]))<<16,
		Size: int64(le.Uint32(b[0x04:])), flags: le.Uint32(b[0x20:]), acl: int64(le.Uint32(b[0x68:])),
	}
	if le.Uint16(b[0x1A:]) == 0 || in.Mode == 0 {
		return nil, damaged("inode %d is free", number)
	}
	copy(in.content[:], b[0x28:])
	if le.Uint16(b[0x76:]) != 0 {
		return nil, damaged("the attributes of inode %d are outside of the disk", number)
	}
	seconds, nanos := int64(int32(le.Uint32(b[0x10:]))), int64(0)
	if len(b) > oldInodeSize {
		extra := int(le.Uint16(b[0x80:]))
		if extra > len(b)-oldInodeSize || extra%4 != 0 {
			return nil, damaged("inode %d has %d more bytes than it can have", number, extra)
		}
		if extra >= 0x8C-oldInodeSize {
			more := le.Uint32(b[0x88:])
			seconds, nanos = seconds+int64(more&3)<<32, int64(more>>2)
		}
		in.attribute = append(in.attribute, b[oldInodeSize+extra:]...)
	}
	in.ModTime = time.Unix(seconds, nanos).UTC()
	switch in.Type() {
	case TypeRegular, TypeDir:
		in.Size |= int64(le.Uint32(b[0x6C:])) << 32
	case TypeChar, TypeBlock:
		in.Rdev = le.Uint32(in.content[:]) | le.Uint32(in.content[4:])
	case TypeSymlink, TypeFIFO, TypeSocket:
	default:
		return nil, damaged("inode %d has the mode %#o", number, in.Mode)
	}
	if in.Size < 0 || in.Size > maxFile {
		return nil, damaged("inode %d has %d bytes", number, in.Size)
	}
	return in, nil
}

// maxFile is the largest file: 2^32 blocks of 4 KiB.
const maxFile = 1 << 44
