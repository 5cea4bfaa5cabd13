//go:build linux

package kerneltest

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/internal/probe"
)

// Locked down for integrity the kernel gives everything; for confidentiality nothing,
// and the error says so. Which of the two it is, the machine was booted with.
func TestALockedDownKernel(t *testing.T) {
	requireRoot(t)
	b, err := os.ReadFile("/sys/kernel/security/lockdown")
	if os.IsNotExist(err) || err == nil && strings.Contains(string(b), "[none]") {
		t.Skip("this kernel is not locked down")
	}
	require.NoError(t, err)
	p, err := probe.New(probe.Config{RingBytes: 1 << 16}, zap.NewNop())
	if strings.Contains(string(b), "[confidentiality]") {
		require.ErrorContains(t, err, "locked down for confidentiality")
		require.ErrorContains(t, err, "lockdown=integrity")
		assert.Empty(t, holds(t).programs)
		return
	}
	require.NoError(t, err)
	defer p.Close()
	assert.Empty(t, p.Unavailable(), "%+v", p.Report())
	for _, r := range p.Report() {
		assert.NotContains(t, r.Reason, "in part", "%+v", r)
	}
}
