package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// certificate makes one in PEM form.
func certificate(t *testing.T, name string, authority bool) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true, IsCA: authority,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestCheckAuthorities(t *testing.T) {
	t.Parallel()
	one, two := certificate(t, "Company Root", true), certificate(t, "Another Root", true)
	for name, c := range map[string]struct {
		text, refused string
		count         int
	}{
		"none":                    {"", "", 0},
		"two with words between":  {"the first:\n" + one + "the second:\n" + two, "", 2},
		"words alone":             {"Company Root", "no certificate", 0},
		"a key":                   {one + "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "PRIVATE KEY", 0},
		"a certificate of a host": {certificate(t, "www.example.com", false), "CN=www.example.com is no authority", 0},
		"damaged":                 {"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read", 0},
		"too many":                {strings.Repeat(one, maxAuthorities+1), "more than 64", 0},
	} {
		list, err := Check(c.text)
		if c.refused == "" && (err != nil || len(list) != c.count) {
			t.Errorf("%s: %d, %v", name, len(list), err)
		}
		if c.refused != "" && (core.CodeOf(err) != core.CodeInvalidField || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
