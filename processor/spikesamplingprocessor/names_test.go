package spikesamplingprocessor

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"go.opentelemetry.io/collector/pdata/pcommon"
)

func TestNamesAreUTF8WithinTheirBound(t *testing.T) {
	for name, want := range map[string]string{
		"chat":                              "chat",
		"caf\xe9":                           "caf\uFFFD",
		strings.Repeat("a", 255) + "é":      strings.Repeat("a", 255),
		strings.Repeat("a", 253) + "😀":      strings.Repeat("a", 253),
		strings.Repeat("a", 254) + "é":      strings.Repeat("a", 254) + "é",
		strings.Repeat("a", 256) + "b":      strings.Repeat("a", 256),
		strings.Repeat("\xff", 300):         "\uFFFD",
		strings.Repeat("a\xff", 300):        strings.Repeat("a\uFFFD", 64),
		strings.Repeat("a\xff", 127) + "😀x": strings.Repeat("a\uFFFD", 64),
	} {
		r := pcommon.NewResource()
		r.Attributes().PutStr("service.name", name)
		got := serviceName(r)
		assert.Equal(t, want, got)
		assert.True(t, utf8.ValidString(got))
		assert.LessOrEqual(t, len(got), maxName)
		operation := newOperations(10).name(operationKey{service: "s", name: name, kernel: true}, 0)
		assert.Equal(t, want, operation)
	}
}

func FuzzValidName(f *testing.F) {
	f.Add(strings.Repeat("a\xff", 300))
	f.Fuzz(func(t *testing.T, s string) {
		got := validName(s)
		if !utf8.ValidString(got) || len(got) > maxName || utf8.ValidString(s) && !strings.HasPrefix(s, got) {
			t.Errorf("%q from %q", got, s)
		}
	})
}
