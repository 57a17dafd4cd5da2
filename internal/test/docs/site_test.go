//go:build site

package docs

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

var site = flag.String("site", "", "the directory of the built site")

// page is a page of the built site: its ids, its links, and what it loads.
type page struct {
	ids          map[string]bool
	links, loads []string
}

// TestSiteLinks follows every link of the site in -site, and wants nothing in it that is loaded from elsewhere.
func TestSiteLinks(t *testing.T) {
	t.Parallel()
	const fewest = 20
	pages := map[string]page{}
	err := fs.WalkDir(os.DirFS(*site), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || path.Ext(name) != ".html" {
			return err
		}
		p, err := readPage(filepath.Join(*site, name))
		pages[name] = p
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) < fewest {
		t.Errorf("the site has %d pages", len(pages))
	}
	for name, p := range pages {
		for _, target := range p.loads {
			if Outside(target) && !strings.HasPrefix(target, "data:") {
				t.Errorf("%s loads %s", name, target)
			}
		}
		for _, target := range slices.Concat(p.links, p.loads) {
			if err := followPage(pages, name, target); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func followPage(pages map[string]page, from, target string) error {
	u, err := url.Parse(target)
	if err != nil || Outside(target) || path.Base(from) == "404.html" {
		return err
	}
	to := path.Join(path.Dir(from), u.Path)
	if u.Path == "" {
		to = from
	}
	info, err := os.Stat(filepath.Join(*site, to))
	if err != nil {
		return fmt.Errorf("%s leads to nothing", target)
	}
	if info.IsDir() {
		to = path.Join(to, "index.html")
	}
	p, ok := pages[to]
	if u.Fragment == "" && (ok || !info.IsDir()) || ok && p.ids[u.Fragment] {
		return nil
	}
	return fmt.Errorf("%s: there is no such page, or no such place on it", target)
}

// loading are the elements whose address a browser fetches without a click.
var loading = map[string]bool{"script": true, "img": true, "link": true, "source": true, "iframe": true}

func readPage(file string) (page, error) {
	p := page{ids: map[string]bool{}}
	f, err := os.Open(file)
	if err != nil {
		return p, err
	}
	defer f.Close()
	z := html.NewTokenizer(f)
	for {
		if z.Next() == html.ErrorToken {
			if errors.Is(z.Err(), io.EOF) {
				return p, nil
			}
			return p, z.Err()
		}
		token := z.Token()
		if token.Type != html.StartTagToken && token.Type != html.SelfClosingTagToken {
			continue
		}
		for _, a := range token.Attr {
			switch {
			case a.Key == "id" || a.Key == "name" && token.Data == "a":
				p.ids[a.Val] = true
			case a.Key != "href" && a.Key != "src" && a.Key != "srcset":
			case loading[token.Data] && !slices.ContainsFunc(token.Attr, func(r html.Attribute) bool {
				return r.Key == "rel" && (r.Val == "canonical" || r.Val == "next" || r.Val == "prev")
			}):
				p.loads = append(p.loads, a.Val)
			default:
				p.links = append(p.links, a.Val)
			}
		}
	}
}
