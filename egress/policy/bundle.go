package policy

import (
	"maps"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

const bundlePrefix = "bundle:"

// bundles are the hosts that common tools reach when they install packages or clone. Data can also leave through a
// registry where users upload files, so each bundle is only as wide as its tool needs.
var bundles = map[string][]string{
	"debian": {"deb.debian.org", "security.debian.org"},
	"ubuntu": {"archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"},
	"alpine": {"dl-cdn.alpinelinux.org"},
	"python": {"pypi.org:443", "files.pythonhosted.org:443"},
	"npm":    {"registry.npmjs.org:443"},
	"go":     {"proxy.golang.org:443", "sum.golang.org:443"},
	"rust":   {"index.crates.io:443", "static.crates.io:443", "static.rust-lang.org:443"},
	"ruby":   {"rubygems.org:443", "index.rubygems.org:443"},
	"maven":  {"repo.maven.apache.org:443", "repo1.maven.org:443"},
	"github": {"github.com:443", "codeload.github.com:443", "objects.githubusercontent.com:443", "raw.githubusercontent.com:443", "release-assets.githubusercontent.com:443"},
	"gitlab": {"gitlab.com:443"},
}

// Bundles returns the names that may follow "bundle:", sorted.
func Bundles() []string { return slices.Sorted(maps.Keys(bundles)) }

// BundleRules returns the rules that a bundle stands for; nil if it does not exist.
func BundleRules(name string) []string { return slices.Clone(bundles[name]) }

func parseBundle(name string) ([]Rule, error) {
	texts := bundles[name]
	if texts == nil {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "there is no bundle %q; there are %s", core.Clip(name), strings.Join(Bundles(), ", "))
	}
	rules := make([]Rule, 0, len(texts))
	for _, t := range texts {
		r, err := parseRule(t)
		if err != nil {
			return nil, err
		}
		rules = append(rules, r)
	}
	return rules, nil
}
