//go:build backends

package backendtest

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/process"
)

// start runs a program until the test ends.
func start(t *testing.T, name, path string, env []string, args ...string) *process.Process {
	t.Helper()
	p, err := process.Start(name, filepath.Join(t.TempDir(), name+".log"), nil, env, path, args...)
	require.NoError(t, err)
	untilTheEnd(t, p)
	return p
}

// untilTheEnd stops a program when the test ends, and shows the end of its output if
// the test failed.
func untilTheEnd(t *testing.T, p *process.Process) {
	t.Helper()
	t.Cleanup(func() {
		assert.NoError(t, p.Stop())
		if t.Failed() {
			t.Logf("the end of %s:\n%s", p.Log, p.Tail())
		}
	})
}

// answers waits until the program answers 200 on an address.
func answers(t *testing.T, p *process.Process, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, p.WaitFor(ctx, "answering on "+address, func() bool {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	}))
}

// freeAddr returns an address on loopback that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	address, err := process.FreeAddress()
	require.NoError(t, err)
	return address
}

// backend returns the path of a back end that `make test-backends` built.
func backend(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("EBPFLLM_BACKENDS")
	require.NotEmpty(t, dir, "EBPFLLM_BACKENDS names no folder; run 'make test-backends'")
	path := filepath.Join(dir, name)
	require.FileExists(t, path, "run 'make test-backends', which builds it")
	return path
}

func collector(t *testing.T) string {
	t.Helper()
	path := os.Getenv("EBPFLLM_COLLECTOR")
	require.NotEmpty(t, path, "EBPFLLM_COLLECTOR names no file; run 'make test-backends'")
	require.FileExists(t, path, "run 'make build'")
	return path
}

func buildServer(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "llmserver")
	out, err := exec.Command("go", "build", "-o", path, "../../examples/llmserver").CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}
