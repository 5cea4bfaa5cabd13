package ebpfllmreceiver

import (
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/confmaptest"

	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/target"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
)

func load(t *testing.T, name string) *Config {
	t.Helper()
	conf, err := confmaptest.LoadConf(filepath.Join("testdata", "config.yaml"))
	require.NoError(t, err)
	sub, err := conf.Sub(component.NewIDWithName(metadata.Type, name).String())
	require.NoError(t, err)
	cfg := NewFactory().CreateDefaultConfig()
	require.NoError(t, sub.Unmarshal(cfg))
	return cfg.(*Config)
}

func TestConfigThatIsValid(t *testing.T) {
	def := load(t, "")
	assert.Equal(t, &Config{MinDuration: time.Millisecond, CollectionInterval: 10 * time.Second, RingBufferMiB: 8}, def)
	require.NoError(t, confmap.Validate(def))
	assert.Empty(t, def.rules())
	assert.Empty(t, def.disabled())

	all := load(t, "all")
	assert.Equal(t, &Config{
		Targets: []TargetConfig{
			{Executable: "llama-server", Ports: []int{8080, 8081}},
			{CommandLine: `vllm\.entrypoints`},
			{PID: 4242},
		},
		Stages:             map[string]StageConfig{"page_fault": {Enabled: true}, "qdisc": {}, "lock": {Enabled: true}},
		MinDuration:        500 * time.Microsecond,
		CollectionInterval: 5 * time.Second,
		EmitUnsampled:      true,
		RingBufferMiB:      32,
	}, all)
	require.NoError(t, confmap.Validate(all))
	assert.Equal(t, []stage.Stage{stage.Qdisc}, all.disabled())
	assert.Equal(t, []target.Rule{
		{Executable: "llama-server", Ports: []uint16{8080, 8081}},
		{CommandLine: regexp.MustCompile(`vllm\.entrypoints`)},
		{PID: 4242},
	}, all.rules())
}

func TestConfigMistakesAreNamedWithTheirRemedy(t *testing.T) {
	for name, want := range map[string][]string{
		"unknown_stage":      {`there is no stage "page_falut"`, "page_fault, reclaim, compaction, page_cache"},
		"unattributed":       {`there is no stage "unattributed"`},
		"all_disabled":       {"all are disabled", "leave one enabled"},
		"negative_durations": {"min_duration is -1ms: it must be at least 10µs", "collection_interval is -10s: it must be at least 10ms"},
		"zero_durations":     {"min_duration is 0s", "collection_interval is 0s"},
		"durations_without_unit": {
			"min_duration is 1ns: it must be at least 10µs", "such as 1ms (a number without a unit is nanoseconds)",
			"collection_interval is 10ns: it must be at least 10ms", "such as 10s (a number without a unit is nanoseconds)",
		},
		"no_targets": {"targets is empty: remove the key to watch every server of an LLM API, or name a target"},
		"pattern_as_executable": {
			`targets[0]: executable "llama*" is compared as it stands, not as a pattern: use command_line`,
			`targets[1]: executable "/opt/llama?/[ab]" is compared`,
		},
		"ring_not_power_of_two": {"ring_buffer_mib is 12: it must be a power of two from 1 to 1024"},
		"ring_negative":         {"ring_buffer_mib is -8"},
		"empty_target":          {"targets[1]: it says nothing: set executable, command_line, ports or pid"},
		"same_target_twice":     {"targets[2] is the same as targets[0]"},
		"bad_target": {
			`targets[0]: executable "bin/server" is neither a name nor an absolute path`, "targets[0]: command_line is not a regular expression",
			"targets[0]: port 0 is not", "targets[0]: port 65536 is not", "targets[0]: pid -1 is not",
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := confmap.Validate(load(t, name))
			for _, w := range want {
				require.ErrorContains(t, err, w)
			}
		})
	}
}

func TestTheSmallestDurationsAreValid(t *testing.T) {
	cfg := defaults()
	cfg.MinDuration, cfg.CollectionInterval = leastMinDuration, leastCollectInterval
	require.NoError(t, confmap.Validate(cfg))
	cfg.MinDuration--
	require.Error(t, confmap.Validate(cfg))
	cfg = defaults()
	cfg.CollectionInterval = leastCollectInterval - 1
	require.Error(t, confmap.Validate(cfg))
}

func TestConfigOptionThatDoesNotExist(t *testing.T) {
	for _, conf := range []map[string]any{
		{"min_durration": "1ms"},
		{"targets": []any{map[string]any{"exe": "x"}}},
		{"stages": map[string]any{"cpu": map[string]any{"enable": true}}},
	} {
		cfg := NewFactory().CreateDefaultConfig()
		require.Error(t, confmap.NewFromStringMap(conf).Unmarshal(cfg), "%v", conf)
	}
}
