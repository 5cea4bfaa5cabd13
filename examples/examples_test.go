// Package examples_test checks that every example's configuration is accepted by the collector that it is written for, and that the
// example of a stranger's collector builds.
package examples_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// strangers is the example that comes with a manifest of its own: its configuration is for the collector which that builds.
const strangers = "existing-collector"

// agents is for the collector that `make build-agent` builds, which internal/backendtest runs on it.
const agents = "tail-sampling/two-tier-agent.yaml"

func TestMain(m *testing.M) {
	code := m.Run()
	if dir != "" {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

func TestConfigurationsAreValid(t *testing.T) {
	configs, err := filepath.Glob("*/*.yaml")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(configs), 12, "examples found: %v", configs)
	for _, config := range configs {
		example := filepath.Dir(config)
		if example == strangers || config == agents {
			continue
		}
		t.Run(strings.TrimSuffix(config, ".yaml"), func(t *testing.T) {
			// As the examples tell their readers to run them: from the root of the repository.
			out, err := run(t, "..", collector(t), "validate", "--config", filepath.Join("examples", config))
			require.NoError(t, err, out)
			assert.FileExists(t, filepath.Join(example, "README.md"))
		})
	}
}

func TestTheReadmesConfigurationIsValid(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	found := 0
	for block := range strings.SplitSeq(string(readme), "```yaml\n") {
		block, _, _ = strings.Cut(block, "```")
		if !strings.Contains(block, "\nservice:\n") {
			continue
		}
		found++
		out, err := run(t, "..", collector(t), "validate", "--config", "yaml:"+block)
		require.NoError(t, err, out)
	}
	assert.Equal(t, 1, found, "configurations in README.md")
}

func TestAMistakeInAnExampleIsNamed(t *testing.T) {
	for _, tc := range []struct{ name, change, want string }{
		{"unknown component", "yaml:exporters::otlp_pigeon::endpoint: loft", "otlp_pigeon"},
		{"unknown option of the receiver", "yaml:receivers::ebpfllm::min_durration: 1ms", "min_durration"},
		{"unknown stage", "yaml:receivers::ebpfllm::stages::page_falt::enabled: false", "page_falt"},
		{"negative duration", "yaml:processors::spike_sampling::decision_wait: -1s", "decision_wait"},
		{"unknown option of the processor", "yaml:processors::spike_sampling::decision_weight: 30s", "decision_weight"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out, err := run(t, "..", collector(t), "validate", "--config", "examples/quickstart/config.yaml", "--config", tc.change)
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, out)
			assert.Contains(t, out, tc.want)
		})
	}
}

// The manifest of a collector elsewhere needs no more than gomod, import and path lines to get both components.
func TestAStrangersCollectorBuildsWithBothComponents(t *testing.T) {
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	// Elsewhere in truth: not below this module, whose go.mod would otherwise be found.
	elsewhere := t.TempDir()
	manifest, err := os.ReadFile(filepath.Join(strangers, "builder.yaml"))
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(string(manifest), "path: ../..\n"))
	manifest = []byte(strings.ReplaceAll(string(manifest), "path: ../..\n", "path: "+root+"\n"))
	require.NoError(t, os.WriteFile(filepath.Join(elsewhere, "builder.yaml"), manifest, 0o600))

	out, err := run(t, elsewhere, ocb(t), "--config", "builder.yaml")
	require.NoError(t, err, out)
	built := filepath.Join(elsewhere, "build", "mycompany-otelcol")

	out, err = run(t, elsewhere, built, "components")
	require.NoError(t, err, out)
	assert.Contains(t, out, "name: ebpfllm\n")
	assert.Contains(t, out, "name: spike_sampling\n")

	out, err = run(t, elsewhere, built, "validate", "--config", filepath.Join(root, "examples", strangers, "config.yaml"))
	require.NoError(t, err, out)
	assert.FileExists(t, filepath.Join(strangers, "README.md"))
}

// dir holds what the tests of this package build.
var dir string

var workDir = sync.OnceValues(func() (string, error) {
	var err error
	dir, err = os.MkdirTemp("", "ebpfllm-examples-")
	return dir, err
})

// collector returns the path of the distribution: the one that EBPFLLM_COLLECTOR names, else one built for this run.
func collector(t *testing.T) string {
	t.Helper()
	path, err := builtCollector()
	require.NoError(t, err)
	return path
}

var builtCollector = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("EBPFLLM_COLLECTOR"); path != "" {
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("EBPFLLM_COLLECTOR names no file; run 'make build' or unset it: %w", err)
		}
		return path, nil
	}
	dir, err := workDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "otelcol-ebpfllm")
	return path, build("../cmd/otelcol-ebpfllm", "-tags", "remove_all_sd,grpcnotrace", "-o", path, ".")
})

// ocb returns the path of the OpenTelemetry Collector Builder, in the version that internal/tools pins.
func ocb(t *testing.T) string {
	t.Helper()
	dir, err := workDir()
	require.NoError(t, err)
	path := filepath.Join(dir, "ocb")
	require.NoError(t, build("../internal/tools", "-o", path, "go.opentelemetry.io/collector/cmd/builder"))
	return path
}

func build(module string, args ...string) error {
	cmd := exec.Command("go", append([]string{"build"}, args...)...)
	cmd.Dir = module
	if out, err := cmd.CombinedOutput(); err != nil {
		return errors.Join(fmt.Errorf("building %s: %w", module, err), errors.New(string(out)))
	}
	return nil
}

// run runs a program in a folder and returns all that it printed.
func run(t *testing.T, in, program string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir = in
	out, err := cmd.CombinedOutput()
	return string(out), err
}
