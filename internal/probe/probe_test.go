package probe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"
)

func TestLoad(t *testing.T) {
	p, err := New(Config{RingBytes: 1 << 20, MinDuration: time.Millisecond}, zaptest.NewLogger(t))
	require.NoError(t, err)
	for _, r := range p.Report() {
		t.Logf("%-14s %v %s %s", r.Stage, r.Available, r.Hook, r.Reason)
	}
	require.NoError(t, p.Close())
}
