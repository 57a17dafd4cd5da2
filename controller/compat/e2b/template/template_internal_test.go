package template

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestBuildIDHoldsTheSize(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, size := range []struct {
		cpus   uint8
		memory uint32
	}{{0, 0}, {0, 0}, {1, 512}, {255, maxMemory}} {
		id := newBuildID(size.cpus, size.memory)
		cpus, memory, err := sizeOf(id)
		if err != nil || cpus != int(size.cpus) || memory != int(size.memory) || seen[id] {
			t.Errorf("%s: %d, %d, %v; want %+v", id, cpus, memory, err, size)
		}
		seen[id] = true
	}
	for _, id := range []string{"", "x", "00000000-0000-4000-8000-000000000000", "{00000000-0000-8000-8000-000000000000}", strings.ToUpper(newBuildID(0xff, 0))} {
		if _, _, err := sizeOf(id); shared.Translate(err).Status != http.StatusNotFound {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func TestImageName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"a": "a", "a-1": "a-1", "a:default": "a", strings.Repeat("a", 63): strings.Repeat("a", 63)} {
		if got := ImageName(name); got != want {
			t.Errorf("%s is the image %s, want %s", name, got, want)
		}
	}
	for _, name := range []string{"", "-", "a-", "A", "a_b", "a.b", strings.Repeat("a", 64), "a:other"} {
		if got := ImageName(name); got == name || !imageName.MatchString(got) || got == ImageName(name+"x") {
			t.Errorf("%q is the image %s", name, got)
		}
	}
}

func TestLinksOfUploads(t *testing.T) {
	t.Parallel()
	l := Links{Secret: []byte(strings.Repeat("s", 32))}
	now, hash := time.Unix(1_700_000_000, 0), strings.Repeat("ab", 32)
	token := l.New(hash, "key_one", now)
	if key, err := l.Check(hash, token, now.Add(linkTime)); err != nil || key != "key_one" {
		t.Errorf("%s, %v", key, err)
	}
	other := Links{Secret: []byte(strings.Repeat("t", 32))}
	for name, check := range map[string]func() (coppice.KeyID, error){
		"late":           func() (coppice.KeyID, error) { return l.Check(hash, token, now.Add(linkTime+time.Second)) },
		"other files":    func() (coppice.KeyID, error) { return l.Check(strings.Repeat("cd", 32), token, now) },
		"other key":      func() (coppice.KeyID, error) { return l.Check(hash, strings.Replace(token, "one", "two", 1), now) },
		"other time":     func() (coppice.KeyID, error) { return l.Check(hash, strings.Replace(token, ".1", ".2", 1), now) },
		"other secret":   func() (coppice.KeyID, error) { return other.Check(hash, token, now) },
		"nothing":        func() (coppice.KeyID, error) { return l.Check(hash, "", now) },
		"a long text":    func() (coppice.KeyID, error) { return l.Check(hash, token+strings.Repeat("x", maxToken), now) },
		"files by names": func() (coppice.KeyID, error) { return l.Check("..", l.New("..", "key_one", now), now) },
	} {
		if key, err := check(); shared.Translate(err).Status != http.StatusForbidden || key != "" {
			t.Errorf("%s: %s, %v", name, key, err)
		}
	}
}

func TestPlacesAreBounded(t *testing.T) {
	t.Parallel()
	var p Places
	for i := range 3 * maxPlaces {
		p.put("op_"+strconv.Itoa(i), place{i, int64(i)})
		if n := len(p.now) + len(p.old); n > maxPlaces {
			t.Fatalf("%d places", n)
		}
	}
	if got := p.of("op_" + strconv.Itoa(3*maxPlaces-1)); got.line != 3*maxPlaces-1 {
		t.Errorf("the newest is at %+v", got)
	}
	if got := p.of("op_0"); got != (place{}) {
		t.Errorf("the oldest is at %+v", got)
	}
}

func TestSteps(t *testing.T) {
	t.Parallel()
	hash := strings.Repeat("ab", 32)
	user := Root
	for _, c := range []struct {
		step Step
		want string
	}{
		{Step{Type: "RUN", Args: []string{"a"}}, "run a"},
		{Step{Type: "RUN", Args: []string{"a", Root}}, "run a"},
		{Step{Type: "RUN", Args: []string{"a", "bob"}}, "user bob, run a, user root"},
		{Step{Type: "RUN", Args: []string{"a", "user"}}, "user alice, run a, user root"},
		{Step{Type: "COPY", Args: []string{".", "/x", "", ""}, FilesHash: hash}, "copy  /x  "},
		{Step{Type: "COPY", Args: []string{"a", "/x", "bob", ""}, FilesHash: hash}, "copy a /x bob "},
		{Step{Type: "USER", Args: []string{"user"}}, "user alice"},
		{Step{Type: "COPY", Args: []string{"a", "/x", "root:root", ""}, FilesHash: hash}, "copy a /x  "},
		{Step{Type: "COPY", Args: []string{"./s/", "/x", "", "0755"}, FilesHash: hash}, "copy s /x alice 0755"},
		{Step{Type: "RUN", Args: []string{"a", "root"}}, "user root, run a, user alice"},
		{Step{Type: "WORKDIR", Args: []string{"w"}}, "workdir w"},
		{Step{Type: "ENV", Args: []string{"A", "b"}}, "env b"},
		{Step{Type: "ENV", Args: []string{"A"}}, "400"},
		{Step{Type: "COPY", Args: []string{"a", "b"}}, "400"},
		{Step{Type: "RUN"}, "400"},
		{Step{Type: "EXPOSE", Args: []string{"80"}}, "501"},
	} {
		var got []string
		steps, err := c.step.translate(&user, "alice")
		if err != nil {
			got = append(got, strconv.Itoa(shared.Translate(err).Status))
		}
		for _, s := range steps {
			switch {
			case s.Run != "":
				got = append(got, "run "+s.Run)
			case s.User != "":
				got = append(got, "user "+s.User)
			case s.Workdir != "":
				got = append(got, "workdir "+s.Workdir)
			case s.Copy != nil:
				got = append(got, strings.Join([]string{"copy", s.Copy.Path, s.Copy.Dest, s.Copy.User, s.Copy.Mode}, " "))
			default:
				got = append(got, "env "+s.Env["A"])
			}
		}
		if text := strings.Join(got, ", "); text != c.want {
			t.Errorf("%+v: %q, want %q", c.step, text, c.want)
		}
	}
}
