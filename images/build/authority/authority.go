// Package authority gives the guests of a Debian image certificate authorities that their operator trusts.
package authority

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/core"
)

// maxAuthorities bounds the certificate authorities that an image gets from its operator.
const maxAuthorities = 64

// directory is where Debian's ca-certificates finds the authorities of an operator, one in each file.
const directory = "/usr/local/share/ca-certificates"

// Check returns the certificates of a PEM text, each in a text of its own. Every one must be an authority.
func Check(text string) ([]string, error) {
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the certificate authorities of the guest: %s; give a file with certificates in PEM form", fmt.Sprintf(format, a...))
	}
	var out []string
	for rest := []byte(text); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			if len(bytes.TrimSpace(rest)) > 0 && len(out) == 0 {
				return nil, bad("there is no certificate")
			}
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, bad("there is a block of type %q", core.Clip(block.Type))
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, bad("certificate %d cannot be read (%v)", len(out)+1, err)
		}
		if cert.BasicConstraintsValid && !cert.IsCA {
			return nil, bad("%s is no authority", core.Clip(cert.Subject.String()))
		}
		if out = append(out, string(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes}))); len(out) > maxAuthorities {
			return nil, bad("there are more than %d", maxAuthorities)
		}
	}
	return out, nil
}

// Hooks writes the authorities to a directory of the host, and returns the options by which mmdebstrap has the guest trust them, at the
// end of its work: as an operator of Debian would do it.
func Hooks(list []string, dir string) ([]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // G301: certificates are public
		return nil, err
	}
	hooks := []string{`--customize-hook=mkdir -p "$1` + directory + `"`}
	for i, text := range list {
		file := filepath.Join(dir, fmt.Sprintf("operator-%02d.crt", i+1))
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // G306: likewise
			return nil, err
		}
		hooks = append(hooks, "--customize-hook=upload "+file+" "+directory+"/"+filepath.Base(file))
	}
	return append(hooks, `--customize-hook=chroot "$1" update-ca-certificates`), nil
}
