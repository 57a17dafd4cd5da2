package grants

import (
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// ProviderCustom is whoever is not known by name: hosts must be given.
const ProviderCustom = "custom"

// provider is what is usual for grants of somebody's secrets.
type provider struct {
	mode     grant.Mode
	hosts    []string
	header   string
	env      string // that programs look for the secret in
	baseEnv  string // likewise the base URL
	basePath string // what a base URL has after its host
}

// providers are those that are known by name. Where a client has a variable for its base URL that is used: it works whatever the client
// trusts.
var providers = map[string]provider{
	"openai":       {grant.ModeBaseURL, []string{"api.openai.com"}, "Authorization", "OPENAI_API_KEY", "OPENAI_BASE_URL", "/v1"},
	"anthropic":    {grant.ModeBaseURL, []string{"api.anthropic.com"}, "X-Api-Key", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", ""},
	"mistral":      {grant.ModeHeader, []string{"api.mistral.ai"}, "Authorization", "MISTRAL_API_KEY", "", ""},
	"gemini":       {grant.ModeHeader, []string{"generativelanguage.googleapis.com"}, "X-Goog-Api-Key", "GEMINI_API_KEY", "", ""},
	"github":       {grant.ModeHeader, []string{"api.github.com", "github.com"}, "Authorization", "GITHUB_TOKEN", "", ""},
	"gitlab":       {grant.ModeHeader, []string{"gitlab.com"}, "Private-Token", "GITLAB_TOKEN", "", ""},
	"huggingface":  {grant.ModeHeader, []string{"huggingface.co"}, "Authorization", "HF_TOKEN", "", ""},
	ProviderCustom: {mode: grant.ModeHeader, header: "Authorization"},
}

// fill gives what a request for a grant leaves open what is usual for its provider.
func (r *Request) fill(name string) error {
	if r.Provider == "" {
		r.Provider = ProviderCustom
		if _, known := providers[name]; known {
			r.Provider = name
		}
	}
	p, known := providers[r.Provider]
	if !known {
		return core.Errorf(core.Invalid, core.CodeInvalidField,
			"provider: %q is not known; leave it out, or give %s, and say what differs", core.Clip(r.Provider), ProviderCustom)
	}
	if r.Mode == "" {
		r.Mode = p.mode
	}
	if len(r.Hosts) == 0 {
		r.Hosts = p.hosts
	}
	if r.Header == "" {
		r.Header = p.header
	}
	if r.Env == "" {
		if r.Env = p.env; r.Env == "" {
			r.Env = variable(name)
		}
	}
	if r.Mode == grant.ModeBaseURL {
		if r.BaseEnv == "" {
			if r.BaseEnv = p.baseEnv; r.BaseEnv == "" {
				r.BaseEnv = variable(name) + "_BASE_URL"
			}
		}
		if r.BasePath == "" {
			r.BasePath = p.basePath
		}
	}
	return nil
}

// variable makes the name of an environment variable of that of a grant.
func variable(name string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z':
			return c - 'a' + 'A'
		case c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
			return c
		}
		return '_'
	}, name)
}
