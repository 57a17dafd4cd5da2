package docs

import (
	"bufio"
	"cmp"
	"fmt"
	"html"
	"strconv"
	"strings"
)

// A source of a picture has one item a line. Words with spaces are in quotes; numbers are units of the picture.
//
//	picture WIDTH HEIGHT "what it shows, for those who cannot see it"
//	frame   X Y WIDTH HEIGHT "title"              a part of the system that holds others
//	KIND    NAME X Y WIDTH HEIGHT "text" ["more text"]
//	line    FROM TO [down|right] ["text"]    right is the default
//	note    X Y "text"
//
// The kinds are checkpoint, machine, ended, part and outside.

// box is an item with a place.
type box struct {
	x, y, width, height int
}

// picture is a picture that is being drawn: lines are below boxes.
type picture struct {
	head, below, above strings.Builder
	boxes              map[string]box
}

const style = `
svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 14px }
.ground { fill: #ffffff } text { fill: #1f2933 } .more { fill: #52606d; font-size: 12px }
rect { stroke-width: 1.5 } .frame { fill: #f5f7fa; stroke: #cbd2d9 } .frametitle { fill: #52606d; font-size: 12px }
.checkpoint { fill: #e3f5ee; stroke: #2b8a66 } .machine { fill: #e4effc; stroke: #3a74c4 }
.ended { fill: #f5f7fa; stroke: #9aa5b1; stroke-dasharray: 4 3 } .part { fill: #ffffff; stroke: #52606d }
.outside { fill: #fdf3e0; stroke: #b7791f }
path { fill: none; stroke: #7b8794; stroke-width: 1.5 } .tip { fill: #7b8794; stroke: none }
@media (prefers-color-scheme: dark) {
.ground { fill: #1b2028 } text { fill: #e4e7eb } .more, .frametitle { fill: #a9b4c0 } .frame { fill: #232a34; stroke: #48535f }
.checkpoint { fill: #17392e; stroke: #4cc38a } .machine { fill: #1a3354; stroke: #6ea8fe } .ended { fill: #232a34; stroke: #7b8794 }
.part { fill: #1b2028; stroke: #a9b4c0 } .outside { fill: #3a2e16; stroke: #e0a93f }
path { stroke: #8d99a6 } .tip { fill: #8d99a6 }
}
`

// Draw turns the source of a picture into SVG. name is its file, which the SVG names as its source.
func Draw(name, source string) (string, error) {
	p := picture{boxes: map[string]box{}}
	s := bufio.NewScanner(strings.NewReader(source))
	for n := 1; s.Scan(); n++ {
		words, err := split(s.Text())
		if err == nil && len(words) > 0 {
			err = p.draw(name, words)
		}
		if err != nil {
			return "", fmt.Errorf("%s:%d: %w", name, n, err)
		}
	}
	return p.head.String() + p.below.String() + p.above.String() + "</svg>\n", s.Err()
}

// split cuts a line into words. A # begins a comment.
func split(line string) ([]string, error) {
	var words []string
	for {
		line = strings.TrimLeft(line, " \t")
		switch {
		case line == "" || line[0] == '#':
			return words, nil
		case line[0] == '"':
			text, rest, ok := strings.Cut(line[1:], `"`)
			if !ok {
				return nil, fmt.Errorf("a text has no end: %s", line)
			}
			words, line = append(words, text), rest
		default:
			word, rest, _ := strings.Cut(line, " ")
			words, line = append(words, word), rest
		}
	}
}

func numbers(words []string, n int) ([]int, error) {
	if len(words) < n {
		return nil, fmt.Errorf("%d numbers are needed", n)
	}
	out := make([]int, n)
	for i := range out {
		v, err := strconv.Atoi(words[i])
		if err != nil {
			return nil, err
		}
		out[i] = v
	}
	return out, nil
}

func (p *picture) draw(name string, words []string) error {
	const dims = 4
	switch kind, args := words[0], words[1:]; kind {
	case "picture":
		v, err := numbers(args, 2)
		if err != nil {
			return err
		}
		title := html.EscapeString(strings.Join(args[2:], " "))
		fmt.Fprintf(&p.head, "<!-- drawn from %s by make generate -->\n", name)
		fmt.Fprintf(&p.head, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\" aria-label=\"%s\">\n<title>%s</title>\n<style>%s</style>\n",
			v[0], v[1], v[0], v[1], title, title, style)
		fmt.Fprintf(&p.head, "<rect class=\"ground\" width=\"%d\" height=\"%d\" rx=\"10\"/>\n", v[0], v[1])
	case "frame":
		v, err := numbers(args, dims)
		if err != nil || len(args) <= dims {
			return cmp.Or(err, fmt.Errorf("a frame has no title"))
		}
		fmt.Fprintf(&p.head, "<rect class=\"frame\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"10\"/>\n", v[0], v[1], v[2], v[3])
		fmt.Fprintf(&p.head, "<text class=\"frametitle\" x=\"%d\" y=\"%d\">%s</text>\n", v[0]+12, v[1]+19, html.EscapeString(args[dims]))
	case "checkpoint", "machine", "ended", "part", "outside":
		return p.box(kind, args)
	case "line":
		return p.line(args)
	case "note":
		v, err := numbers(args, 2)
		if err != nil || len(args) != 3 {
			return cmp.Or(err, fmt.Errorf("a note has a place and a text"))
		}
		p.text("more", "start", v[0], v[1], args[2])
	default:
		return fmt.Errorf("there is no kind %q", kind)
	}
	return nil
}

func (p *picture) box(kind string, args []string) error {
	const dims, half, more = 4, 5, 17
	if len(args) < 1 {
		return fmt.Errorf("a %s has no name", kind)
	}
	name, args := args[0], args[1:]
	v, err := numbers(args, dims)
	if err != nil {
		return err
	}
	b := box{v[0], v[1], v[2], v[3]}
	p.boxes[name] = b
	round := 6
	if kind == "checkpoint" {
		round = b.height / 2
	}
	fmt.Fprintf(&p.above, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"%d\"/>\n", kind, b.x, b.y, b.width, b.height, round)
	lines := args[dims:]
	y := b.y + b.height/2 + half - (len(lines)-1)*more/2
	for i, text := range lines {
		class := "text"
		if i > 0 {
			class = "more"
		}
		p.text(class, "middle", b.x+b.width/2, y+i*more, text)
	}
	return nil
}

// line joins two boxes: from the right side to the left side, or with "down" from the lower side to the upper side.
func (p *picture) line(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("a line joins two boxes")
	}
	from, ok := p.boxes[args[0]]
	to, found := p.boxes[args[1]]
	if !ok || !found {
		return fmt.Errorf("there is no box %s or %s above", args[0], args[1])
	}
	way, text := "right", ""
	for _, word := range args[2:] {
		if word == "down" || word == "right" {
			way = word
		} else {
			text = word
		}
	}
	x1, y1, x2, y2 := from.x+from.width, from.y+from.height/2, to.x, to.y+to.height/2
	c1x, c1y, c2x, c2y := (x1+x2)/2, y1, (x1+x2)/2, y2
	tip := "-8 -4 v8"
	if way == "down" {
		x1, y1, x2, y2 = from.x+from.width/2, from.y+from.height, to.x+to.width/2, to.y
		c1x, c1y, c2x, c2y = x1, (y1+y2)/2, x2, (y1+y2)/2
		tip = "-4 -8 h8"
	}
	fmt.Fprintf(&p.below, "<path d=\"M%d %d C%d %d %d %d %d %d\"/>\n", x1, y1, c1x, c1y, c2x, c2y, x2, y2)
	fmt.Fprintf(&p.below, "<path class=\"tip\" d=\"M%d %d l%sz\"/>\n", x2, y2, tip)
	switch {
	case text != "" && way == "down":
		p.text("more", "start", (x1+x2)/2+8, (y1+y2)/2+4, text)
	case text != "":
		p.text("more", "middle", (x1+x2)/2, (y1+y2)/2-7, text)
	}
	return nil
}

func (p *picture) text(class, anchor string, x, y int, text string) {
	fmt.Fprintf(&p.above, "<text class=\"%s\" x=\"%d\" y=\"%d\" text-anchor=\"%s\">%s</text>\n", class, x, y, anchor, html.EscapeString(text))
}
