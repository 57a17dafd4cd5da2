package guestapi

import (
	"bytes"
	"io"
	"slices"
)

const (
	magicLen  = 8
	nonceLen  = 16
	recordLen = magicLen + 1 + nonceLen
	dialLen   = 12 // the part of a nonce that names the dial
)

// magic begins a record. Its first byte occurs only once in it, occurs in no UTF-8 text, and is not a yamux version.
var magic = [magicLen]byte{0xC0, 'c', 'p', 'p', 'g', 'u', 's', 0x1A}

// stuffing follows the first seven bytes of the magic wherever data contains them. It must differ from the eighth byte
// and from the first.
const stuffing = 0x00

// record is a hello or an answer.
type record struct {
	version byte
	nonce   [nonceLen]byte
}

func (r record) dial() [dialLen]byte { return [dialLen]byte(r.nonce[:dialLen]) }

// announcement reports whether an agent sent this at its start, as an answer to no hello.
func (r record) announcement() bool { return r.nonce == [nonceLen]byte{} }

func (r record) bytes() []byte {
	return slices.Concat(magic[:], []byte{r.version}, r.nonce[:])
}

// encoder stuffs data. The zero value is the state after a record.
type encoder struct {
	matched int // how many bytes of the magic the data ends with so far
	buf     []byte
}

// encode returns the bytes to send for p; that is p itself when nothing must be stuffed. The result is valid until the
// next call.
func (e *encoder) encode(p []byte) []byte {
	if e.matched == 0 && bytes.IndexByte(p, magic[0]) < 0 {
		return p
	}
	e.buf = e.buf[:0]
	start := 0
	for i := 0; i < len(p); i++ {
		if e.matched == 0 {
			skip := bytes.IndexByte(p[i:], magic[0])
			if skip < 0 {
				break
			}
			i += skip
		}
		if e.matched = step(e.matched, p[i]); e.matched == magicLen-1 {
			e.buf = append(append(e.buf, p[start:i+1]...), stuffing)
			start, e.matched = i+1, 0
		}
	}
	if start == 0 {
		return p
	}
	e.buf = append(e.buf, p[start:]...)
	return e.buf
}

// step advances a match of the magic by one byte. The first byte of the magic occurs only once in it, so after a
// mismatch a new match can begin only at this byte.
func step(matched int, c byte) int {
	switch c {
	case magic[matched]:
		return matched + 1
	case magic[0]:
		return 1
	}
	return 0
}

// decoder splits a stream into data and records, even if the stream was cut at any byte before.
type decoder struct {
	r        io.Reader
	buf      []byte
	at, end  int
	matched  int  // how many bytes of the magic were just seen, as data or inside a record
	unstuff  bool // seven bytes of the magic were data: the next byte is stuffing, or completes a magic
	inRecord bool
	rec      [recordLen - magicLen]byte
	recAt    int
}

const decoderBuffer = 16 << 10

func newDecoder(r io.Reader) *decoder { return &decoder{r: r, buf: make([]byte, decoderBuffer)} }

// buffered reports whether there are bytes that were read from the stream and not decoded yet.
func (d *decoder) buffered() bool { return d.at < d.end }

// idle reports whether the next byte is data or begins a magic.
func (d *decoder) idle() bool { return d.matched == 0 && !d.unstuff && !d.inRecord }

// restart forgets a partial magic or record.
func (d *decoder) restart() { d.matched, d.unstuff, d.inRecord = 0, false, false }

// fill reads the stream if nothing is buffered.
func (d *decoder) fill() error {
	if d.buffered() {
		return nil
	}
	n, err := d.r.Read(d.buf)
	d.at, d.end = 0, n
	if n > 0 {
		return nil
	}
	return err
}

// next puts data into p until p is full, the bytes read from the stream are used up, or a record is complete. The
// beginning of a magic counts as data until the magic is complete, because nobody knows whether the rest will come. It
// reads from the stream only when nothing is buffered; the error is the stream's.
func (d *decoder) next(p []byte) (n int, rec *record, err error) {
	if err := d.fill(); err != nil {
		return 0, nil, err
	}
	for d.at < d.end && n < len(p) {
		c := d.buf[d.at]
		if d.idle() && c != magic[0] {
			b := d.buf[d.at:d.end]
			if i := bytes.IndexByte(b, magic[0]); i > 0 {
				b = b[:i]
			}
			m := copy(p[n:], b)
			n, d.at = n+m, d.at+m
			continue
		}
		d.at++
		if d.inRecord {
			if rec := d.recordByte(c); rec != nil {
				return n, rec, nil
			}
			continue
		}
		if d.unstuff {
			d.unstuff, d.matched = false, 0
			if c == magic[magicLen-1] {
				d.inRecord, d.recAt = true, 0
			}
			if c == magic[magicLen-1] || c == stuffing {
				continue
			}
			// The data was cut off here: the next bytes are decoded on their own.
		}
		d.matched = step(d.matched, c)
		d.unstuff = d.matched == magicLen-1
		p[n] = c
		n++
	}
	return n, nil, nil
}

// recordByte takes one byte after a magic and returns the record that it completes.
func (d *decoder) recordByte(c byte) *record {
	d.rec[d.recAt] = c
	d.recAt++
	if d.matched = step(d.matched, c); d.matched == magicLen {
		d.recAt, d.matched = 0, 0 // this record was cut off: another begins here
		return nil
	}
	if d.recAt < len(d.rec) {
		return nil
	}
	d.restart()
	return &record{version: d.rec[0], nonce: [nonceLen]byte(d.rec[1:])}
}
