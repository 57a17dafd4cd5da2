package controller_test

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// authorityOf makes an authority of a certificate that a database could have.
func authorityOf(t *testing.T, change func(*x509.Certificate)) *mtls.Authority {
	t.Helper()
	key, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "coppice test"}, NotBefore: now.Add(-2 * time.Hour), NotAfter: now.Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	change(template)
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	a, err := mtls.LoadAuthority(der, pkcs8)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestUnusableAuthority: a controller whose authority cannot vouch for attestations would refuse every fork, so it does not
// start, is not ready, and says what to do.
func TestUnusableAuthority(t *testing.T) {
	t.Parallel()
	store := openStore(t, testpg.New(t, migrations.Up))
	for name, change := range map[string]func(*x509.Certificate){
		"no authority": func(c *x509.Certificate) { c.IsCA, c.KeyUsage = false, x509.KeyUsageDigitalSignature },
		"expired":      func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Hour) },
		"not yet":      func(c *x509.Certificate) { c.NotBefore = time.Now().Add(30 * time.Minute) },
	} {
		c := controller.New(controller.Config{ClusterID: "test", Authority: authorityOf(t, change)}, store, nil, logger(t))
		_, begun := c.Bootstrap(t.Context())
		for what, err := range map[string]error{"bootstrap": begun, "run": c.Run(t.Context()), "ready": c.Ready(t.Context())} {
			if core.CodeOf(err) != core.CodeAuthorityUnusable || !strings.Contains(err.Error(), "clock") {
				t.Errorf("%s: %s: %v (%s)", name, what, err, core.CodeOf(err))
			}
		}
	}
	good := controller.New(controller.Config{ClusterID: "test", Authority: authorityOf(t, func(*x509.Certificate) {})}, store, nil, logger(t))
	if _, err := good.Bootstrap(t.Context()); err != nil {
		t.Errorf("with a good authority: %v", err)
	}
}
