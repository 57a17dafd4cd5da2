package grant

import (
	"bytes"
	"html"
	"slices"
	"unicode/utf8"
)

// view is one way to read a text: as it is, or with one kind of escape decoded. Every view searches for values in all
// their forms, so a value is found no matter which of its characters were escaped.
type view struct {
	begins byte // first byte of an escape; 0: the view decodes none
	// undo decodes the escape at the beginning of b, appends the result to text and returns the length of the escape in
	// bytes. The length is 0 when there is no escape, and -1 when more bytes are needed to decide.
	undo func(text, b []byte) ([]byte, int)
}

// views are all views. The first reads the text as it is.
var views = []view{{}, {'%', undoPercent}, {'\\', undoBackslash}, {'&', undoEntity}}

func unhex(b []byte) (v rune, ok bool) {
	for _, c := range b {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return 0, false
		}
		v = v<<4 | rune(c)
	}
	return v, true
}

// digits reads an escape: first is the number of its bytes before n hexadecimal digits. size is as undo returns it.
func digits(b []byte, first, n int) (v rune, size int) {
	v, ok := unhex(b[first:min(first+n, len(b))])
	switch {
	case !ok:
		return 0, 0
	case len(b) < first+n:
		return 0, -1
	}
	return v, first + n
}

// undoPercent decodes the escapes of URLs and forms.
func undoPercent(text, b []byte) ([]byte, int) {
	v, n := digits(b, 1, 2)
	if n > 0 {
		text = append(text, byte(v)) //nolint:gosec // two digits
	}
	return text, n
}

// undoBackslash decodes the escapes of JSON and of program sources.
func undoBackslash(text, b []byte) ([]byte, int) {
	if len(b) < 2 {
		return text, -1
	}
	var v rune
	var n int
	switch b[1] {
	case '/', '\\', '"', '\'':
		return append(text, b[1]), 2
	case 'x':
		if v, n = digits(b, 2, 2); n > 0 {
			text = append(text, byte(v)) //nolint:gosec // two digits
		}
		return text, n
	case 'u':
		v, n = digits(b, 2, 4)
	case 'U':
		v, n = digits(b, 2, 8)
	}
	const high, low, end = 0xd800, 0xdc00, 0xe000 // the surrogate halves of a character
	if n == 6 && v >= high && v < low {
		rest := b[n:]
		if !bytes.HasPrefix(rest, []byte(`\u`)[:min(2, len(rest))]) {
			return text, 0
		}
		if len(rest) < 2 {
			return text, -1
		}
		w, more := digits(rest, 2, 4)
		if more > 0 && (w < low || w >= end) {
			more = 0
		}
		if more <= 0 {
			return text, more
		}
		v, n = 0x10000+(v-high)<<10+w-low, n+more
	}
	if n > 0 {
		text = utf8.AppendRune(text, v)
	}
	return text, n
}

// undoEntity decodes the entities of HTML and XML.
func undoEntity(text, b []byte) ([]byte, int) {
	const longest = 34 // includes & and ;
	for i := 1; i < min(len(b), longest); i++ {
		switch c := b[i]; {
		case c == ';':
			is := string(b[:i+1])
			if as := html.UnescapeString(is); as != is {
				return append(text, as...), i + 1
			}
			return text, 0
		case c == '#' && i == 1, '0' <= c && c <= '9', 'a' <= c|0x20 && c|0x20 <= 'z':
		default:
			return text, 0
		}
	}
	if len(b) < longest {
		return text, -1
	}
	return text, 0
}

// needle is one form of a value.
type needle struct {
	text []byte
	back []int32 // KMP failure function: for each prefix, the length of its longest proper prefix that is also a suffix
}

func newNeedle(text []byte) needle {
	n := needle{text, make([]int32, len(text))}
	k := int32(0)
	for i := 1; i < len(text); i++ {
		for k > 0 && text[i] != text[k] {
			k = n.back[k-1]
		}
		if text[i] == text[k] {
			k++
		}
		n.back[i] = k
	}
	return n
}

// step searches on when the text before ended with the first k bytes of the needle. It returns with how many bytes of
// the needle the text ends now, or that the whole needle was found.
func (n *needle) step(k int, text []byte) (int, bool) {
	for i := 0; i < len(text); i++ {
		if k == 0 {
			skip := bytes.IndexByte(text[i:], n.text[0])
			if skip < 0 {
				return 0, false
			}
			i += skip
		}
		for k > 0 && text[i] != n.text[k] {
			k = int(n.back[k-1])
		}
		if text[i] == n.text[k] {
			k++
		}
		if k == len(n.text) {
			return 0, true
		}
	}
	return k, false
}

// feed does the same as step, faster for long texts: it compares only their ends byte by byte.
func (n *needle) feed(k int, text []byte) (int, bool) {
	edge := len(n.text) - 1
	if len(text) <= 2*edge {
		return n.step(k, text)
	}
	if k > 0 {
		if _, found := n.step(k, text[:edge]); found {
			return 0, true
		}
	}
	if bytes.Contains(text, n.text) {
		return 0, true
	}
	return n.step(0, text[len(text)-edge:])
}

// looking is the state of a view's search in a stream.
type looking struct {
	view
	begun  []int  // for each needle: with how many of its bytes the text ends
	cut    []byte // an incomplete escape
	widths []byte // for each of the text's last bytes that may begin a needle: how many bytes of the stream it stands for
	width  int    // their sum
}

// feed takes the next bytes of the stream. It returns how many of the last bytes of the stream may be the beginning of
// a value.
func (l *looking) feed(needles []needle, p []byte) (keep int, found bool) {
	if l.begins == 0 {
		for i := range needles {
			if l.begun[i], found = needles[i].feed(l.begun[i], p); found {
				return 0, true
			}
			keep = max(keep, l.begun[i])
		}
		return keep, false
	}
	text, widths := l.read(p)
	most := 0
	for i := range needles {
		if l.begun[i], found = needles[i].feed(l.begun[i], text); found {
			return 0, true
		}
		most = max(most, l.begun[i])
	}
	l.widths = append(l.widths, widths...)
	for _, w := range widths {
		l.width += int(w)
	}
	gone := len(l.widths) - most
	for _, w := range l.widths[:gone] {
		l.width -= int(w)
	}
	l.widths = l.widths[gone:] // later appends reallocate it from time to time, which frees the front
	return l.width + len(l.cut), false
}

// read decodes escapes. widths says how many bytes of the stream each byte of the text stands for. If one escape gives
// several bytes, the first of them has the whole width.
func (l *looking) read(p []byte) (text, widths []byte) {
	rest := p
	if len(l.cut) > 0 {
		rest = append(l.cut, p...)
		l.cut = nil
	}
	text, widths = make([]byte, 0, len(rest)), make([]byte, 0, len(rest))
	plain := func(b []byte) {
		text = append(text, b...)
		for range b {
			widths = append(widths, 1)
		}
	}
	for len(rest) > 0 {
		at := bytes.IndexByte(rest, l.begins)
		if at < 0 {
			plain(rest)
			break
		}
		plain(rest[:at])
		rest = rest[at:]
		before := len(text)
		var n int
		if text, n = l.undo(text, rest); n < 0 {
			l.cut = slices.Clone(rest)
			break
		}
		if n == 0 {
			plain(rest[:1])
			rest = rest[1:]
			continue
		}
		widths = append(widths, byte(n)) //nolint:gosec // an escape has less than 40 bytes
		for range len(text) - before - 1 {
			widths = append(widths, 0)
		}
		rest = rest[n:]
	}
	return text, widths
}

// idle reports whether a view has nothing under way and p contains no escape of this view.
func (l *looking) idle(p []byte) bool {
	return len(l.cut) == 0 && len(l.widths) == 0 && bytes.IndexByte(p, l.begins) < 0
}

// ends reports whether everything that a view has begun lies within the last bytes of the stream.
func (l *looking) ends(within int) bool { return slices.Max(l.begun) <= within }

// begin takes over what another view has begun, in bytes that both views read unchanged.
func (l *looking) begin(o *looking) {
	copy(l.begun, o.begun)
	l.width = slices.Max(l.begun)
	l.widths = bytes.Repeat([]byte{1}, l.width)
}
