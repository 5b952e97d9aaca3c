"""Chat templates with the constructs that templates of the families use, each shorter than the family's own."""

GEMMA = """{{ bos_token }}
{%- set ns = namespace(system='', offset=0) -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ns.offset = 1 -%}
    {%- if messages[0]['content'] is string -%}
        {%- set ns.system = messages[0]['content'] ~ '\n\n' -%}
    {%- else -%}
        {%- set ns.system = messages[0]['content'][0]['text'] ~ '\n\n' -%}
    {%- endif -%}
{%- endif -%}
{%- for message in messages[ns.offset:] -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Turns must alternate between user and assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (ns.system if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor -%}
    {%- else -%}
        {{ raise_exception("A content is text or parts") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""

PHI4_MINI = """
{%- for message in messages %}
    {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
        {{- '<|system|>' ~ message['content'] ~ '<|tool|>' ~ message['tools'] ~ '<|/tool|><|end|>' }}
    {%- else %}
        {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% else %}{{- eos_token }}{% endif %}
"""

OLMO2 = """{{ bos_token }}{% for message in messages %}
{% if message['role'] in ['system', 'user'] %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}
{%- elif not loop.last %}
{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}
{%- else %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{%- endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\n' }}
{%- endif %}
{%- endfor %}
"""

GRANITE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = "Today's Date: " + strftime_now('%B %d, %Y') + '.\nYou are helpful.' %}
    {%- if tools and documents %}
        {%- set system = system + ' Use the tools and the documents.' %}
    {%- elif documents %}
        {%- set system = system + ' Use the documents.' %}
    {%- endif %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<|start_of_role|>document ' + (document | tojson) + '<|end_of_role|>\n' + document['text'] }}
    {{- '<|end_of_text|>\n' if not loop.last else '' }}
{%- endfor %}
{%- for message in turns %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

SMOLLM3 = """
{%- set ns = namespace(mode='/think', instructions='') -%}
{%- if enable_thinking is defined and not enable_thinking %}{% set ns.mode = '/no_think' %}{% endif -%}
{%- if messages[0].role == 'system' -%}
    {%- if '/no_think' in messages[0].content %}{% set ns.mode = '/no_think' %}{% endif -%}
    {%- set ns.instructions = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{{- '<|im_start|>system\n' -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- 'Today Date: ' ~ today ~ '\nReasoning Mode: ' + ns.mode + '\n\n' + ns.instructions + '<|im_end|>\n' -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}
        {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}
        {%- if ns.mode == '/think' -%}
            {{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else -%}
            {{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- endif -%}
        {%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' + ('' if ns.mode == '/think' else '<think>\n\n</think>\n') }}
{%- endif -%}
"""

GPT_OSS = """
{%- macro type_of(spec) -%}
    {%- if spec is mapping and spec.type == 'array' -%}{{ type_of(spec['items']) }}[]
    {%- elif spec is mapping and spec.type -%}{{ spec.type }}
    {%- else -%}any
    {%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- '## ' + name + '\n\nnamespace ' + name + ' {\n\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '// ' + tool.description|default('') + '\ntype ' + tool.name + ' = ' }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- '(_: {\n' }}
            {%- for key, spec in tool.parameters.properties.items() %}
                {{- key + ': ' + type_of(spec) + (',' if not loop.last else '') + '\n' }}
            {%- endfor %}
            {{- '}) => any;\n\n' }}
        {%- else %}
            {{- '() => any;\n\n' }}
        {%- endif %}
    {%- endfor %}
    {{- '} // namespace ' + name }}
{%- endmacro -%}
{%- macro system_message() -%}
    {%- if model_identity is not defined %}{%- set model_identity = 'You are a large language model.' %}{%- endif %}
    {{- model_identity + '\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' }}
    {{- (reasoning_effort if reasoning_effort is defined else 'medium') + '\n\n# Valid channels: analysis, final.' }}
{%- endmacro -%}
{{- '<|start|>system<|message|>' }}{{- system_message() }}{{- '<|end|>' }}
{%- set has_developer = messages[0].role in ('developer', 'system') %}
{%- if has_developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if has_developer %}{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{% endif %}
    {%- if tools %}{{- '# Tools\n\n' }}{{- namespace_of('functions', tools) }}{% endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in (messages[1:] if has_developer else messages) %}
    {%- if message.role == 'assistant' %}
        {%- if message.content and '<|channel|>' in message.content %}
            {{- raise_exception('Put the text of the channel analysis in `thinking`') }}
        {%- endif %}
        {%- if 'tool_calls' in message %}
            {%- if message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments|tojson + '<|call|>' }}
            {%- set last_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if 'thinking' in message %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
            {%- set last_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content|tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

MISTRAL = """
{%- set ns = namespace(index=0, system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for message in turns %}
    {%- if message['role'] not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, user and assistant alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools or [] %}
                {{- '{' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {{- '"' + key + '": ' + (value | tojson) + (', ' if not loop.last else '') }}
                {%- endfor %}
                {{- '}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (ns.system + '\n\n' if loop.last and ns.system else '') + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {
    "gemma": GEMMA,
    "phi-4-mini": PHI4_MINI,
    "olmo-2": OLMO2,
    "granite-3": GRANITE,
    "smollm3": SMOLLM3,
    "gpt-oss": GPT_OSS,
    "mistral": MISTRAL,
}
