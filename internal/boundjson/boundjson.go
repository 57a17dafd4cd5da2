// Package boundjson decodes JSON from hostile senders. Every answer of a guest's agent and every
// message of a runner goes through it. It bounds the bytes that are read, the elements, the nesting
// and the text that is kept. The bounds hold before encoding/json sees a value, so a small message
// cannot become a large heap.
package boundjson

import (
	"encoding/json"
	"fmt"
	"io"
)

// Bound says how much of one kind of message is read and kept. All fields but Cut and Keep must be set.
type Bound struct {
	Name     string // of the message, for errors
	Bytes    int64  // read from the wire; a longer message is refused
	Elements int    // values and members of all lists and objects together; more are refused
	List     int    // values or members of one list or object; more are refused
	Depth    int    // of nesting; deeper messages are refused
	String   int    // bytes of one string; the rest is dropped
	Text     int    // bytes of all strings together, beyond the first ShortString of each; the rest is dropped

	Cut  int // lists at this depth and below are cut at Keep values instead of refused; 0 cuts none
	Keep int
}

// ShortString is the part of a string that Text does not count: ids and states survive long texts before them.
const ShortString = 64

// maxToken bounds a number or a literal.
const maxToken = 64

// Error says which bound a message broke.
type Error struct {
	Message string // Bound.Name
	What    string
	Limit   int64
}

// Error names the bound.
func (e *Error) Error() string {
	return fmt.Sprintf("%s has more than %d %s", e.Message, e.Limit, e.What)
}

// Charger is asked before bytes are kept. Its error ends the decoding.
type Charger interface{ Grow(n int) error }

// Decode reads one JSON value within a bound. A Charger, if there is one, is charged for what is kept meanwhile.
func Decode(r io.Reader, b Bound, charge Charger, out any) error {
	f := &filter{r: r, bound: b, charge: charge, text: b.Text, left: b.Bytes}
	err := json.NewDecoder(f).Decode(out)
	if f.err != nil {
		return f.err
	}
	return err
}

// level is one open list or object.
type level struct {
	list  bool
	count int
}

// filter passes JSON on and drops what a bound cuts off. It is no parser: what is not JSON stays that way.
type filter struct {
	r      io.Reader
	bound  Bound
	charge Charger
	err    error

	left     int64 // bytes that may still be read
	elements int
	text     int // of Bound.Text, left
	levels   []level
	cutAt    int // the depth of the list whose rest is dropped; 0: none

	inString, clipped bool
	length            int // of the string or token so far
	escape            int // digits of an escape sequence still to come, or afterSlash
	space             bool
}

// Read implements io.Reader.
func (f *filter) Read(p []byte) (int, error) {
	for f.err == nil && len(p) > 0 {
		if f.left <= 0 {
			var probe [1]byte
			n, err := f.r.Read(probe[:])
			if n > 0 {
				f.err = f.over("bytes", f.bound.Bytes)
				break
			}
			if err != nil {
				return 0, err
			}
			continue
		}
		n, err := f.r.Read(p[:min(int64(len(p)), f.left)])
		f.left -= int64(n)
		kept := p[:0]
		for _, c := range p[:n] {
			if f.allow(c) {
				kept = append(kept, c)
			}
			if f.err != nil {
				return 0, f.err
			}
		}
		if f.charge != nil && len(kept) > 0 {
			if f.err = f.charge.Grow(len(kept)); f.err != nil {
				return 0, f.err
			}
		}
		if len(kept) > 0 || err != nil {
			return len(kept), err
		}
	}
	return 0, f.err
}

func (f *filter) over(what string, limit int64) error {
	return &Error{Message: f.bound.Name, What: what, Limit: limit}
}

// allow says whether a byte is passed on.
func (f *filter) allow(c byte) bool {
	if f.inString {
		return f.inText(c) && f.cutAt == 0
	}
	wasSpace := f.space
	f.space = false
	switch c {
	case ' ', '\t', '\r', '\n':
		f.space = true
		return !wasSpace && f.cutAt == 0 // one of a run is enough to keep tokens apart
	case '"':
		f.inString, f.clipped, f.length = true, false, 0
	case '{', '[':
		f.length = 0
		f.open(c == '[')
	case '}', ']':
		f.length = 0
		if f.cutAt == len(f.levels) {
			f.cutAt = 0 // the end of the list that was cut
		}
		if len(f.levels) > 0 {
			f.levels = f.levels[:len(f.levels)-1]
		}
	case ',':
		f.length = 0
		f.next()
	case ':':
		f.length = 0
	default:
		if f.length++; f.length > maxToken {
			f.err = f.over("characters in a number", maxToken)
		}
	}
	return f.cutAt == 0
}

func (f *filter) open(list bool) {
	if len(f.levels) >= f.bound.Depth {
		f.err = f.over("levels", int64(f.bound.Depth))
		return
	}
	f.levels = append(f.levels, level{list: list, count: 1})
	f.element()
}

// next begins another value of the innermost list or object.
func (f *filter) next() {
	if len(f.levels) == 0 {
		return
	}
	if f.cutAt > 0 {
		return
	}
	at := &f.levels[len(f.levels)-1]
	depth := len(f.levels)
	if at.list && f.bound.Cut > 0 && depth >= f.bound.Cut && at.count >= f.bound.Keep {
		f.cutAt = depth
		return
	}
	if at.count++; at.count > f.bound.List {
		f.err = f.over("elements in one list", int64(f.bound.List))
		return
	}
	f.element()
}

func (f *filter) element() {
	if f.cutAt > 0 {
		return
	}
	if f.elements++; f.elements > f.bound.Elements {
		f.err = f.over("elements", int64(f.bound.Elements))
	}
}

// afterSlash is the state of an escape sequence whose first byte was read.
const (
	afterSlash    = -1
	unicodeDigits = 4
	longestEscape = 6
)

// inText takes a byte of a string. An escape sequence is kept whole or dropped whole.
func (f *filter) inText(c byte) bool {
	switch {
	case f.escape == afterSlash:
		if f.escape = 0; c == 'u' {
			f.escape = unicodeDigits
		}
		return !f.clipped
	case f.escape > 0:
		f.escape--
		return !f.clipped
	case c == '"':
		f.inString, f.length = false, 0
		return true
	case c == '\\':
		f.escape = afterSlash
		return f.take(longestEscape)
	}
	return f.take(1)
}

// take says whether the next n bytes of a string are kept.
func (f *filter) take(n int) bool {
	if f.clipped {
		return false
	}
	if f.length += n; f.length > f.bound.String {
		f.clipped = true
		return false
	}
	if f.length > ShortString && f.cutAt == 0 {
		if f.text -= n; f.text < 0 {
			f.clipped = true
			return false
		}
	}
	return true
}
